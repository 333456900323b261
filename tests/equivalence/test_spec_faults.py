"""Speculation while the device lives in a worker process that may fail: the same tokens as
without, before and after every kind of recovery."""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from drafters import METHODS, RANGES, SMALL, setting_of
from engine_runs import GOLDENS, MAX_LEN, ids_of, oracle_engine, prompt_of, request, run
from test_speculation import in_turns, spec_figures

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.executor.worker import WorkerExecutor
from jaxengine.executor.worker_process import WorkerDied, WorkerError
from jaxengine.front.async_llm import AsyncLLM, Placement
from jaxengine.settings.faults import Fault
from jaxengine.wire.messages import EngineRequest

LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
ADAPTIVE = {"method": "ngram", "adaptive": True, "num_speculative_tokens": 2, **LOOKUP}


def settings_of(model: str, setting: dict[str, Any], **more: Any) -> EngineConfig:
    """Of an engine whose device is a worker's; of the programs that the other suites compile."""
    return EngineConfig.of(
        **SMALL,
        model=str(GOLDENS / model),
        max_model_len=MAX_LEN,
        block_size=4,
        max_logprobs=5,
        num_gpu_blocks_override=MAX_LEN // 4,
        warmup="lazy",
        enable_fault_tolerance=True,
        speculative_config=json.dumps(setting),
        **more,
    )


def requests_of(rng: random.Random) -> list[EngineRequest]:
    texts = [prompt_of(rng, 6) * 3 for _ in range(3)]
    more: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 4}, {}]
    return [
        request(f"{i}", text, max_tokens=30, allowed_token_ids=[7, 8, 9], **params)
        for i, (text, params) in enumerate(zip(texts, more, strict=True))
    ]


def fails(core: EngineCore, kind: type[Exception], requests: list[EngineRequest]) -> None:
    with pytest.raises(kind):
        run(core, requests)
    core.on_fault()


def check(model: str, setting: dict[str, Any], recoveries: tuple[str, ...]) -> None:
    """Before the second round a step raises and the worker is reset; before the next the worker
    is killed and replaced; before the last a step raises and the worker is replaced."""
    requests = requests_of(random.Random(3))
    want = ids_of(run(oracle_engine(model), requests))
    core = EngineCore(settings_of(model, setting))
    executor = core.executor
    assert isinstance(executor, WorkerExecutor)
    try:
        for recover in ("", *recoveries):
            if recover in ("retry", "both"):
                at = executor._injector._counts["step"] + 9
                executor._injector._faults = (Fault("raise", at),)
                fails(core, WorkerError, requests)
                core.recover(respawn=recover == "both")
            elif recover:
                core.add_request(requests[0])
                for _ in range(9):
                    core.step()
                psutil.Process(executor.pid).kill()
                fails(core, WorkerDied, requests[1:])
                core.recover(respawn=True)
            before = spec_figures(core)
            assert ids_of(in_turns(core, requests, every=8)) == want, recover
            after = spec_figures(core)
            if setting.get("adaptive"):  # it may find that drafts do not pay
                assert after["steps_k0"] > before["steps_k0"]
            else:
                assert after["num_draft_tokens"] - before["num_draft_tokens"] > 10, recover
            core.scheduler.check_integrity()
        assert core.epoch == sum(one != "retry" for one in recoveries)
    finally:
        core.shutdown()


def test_look_ups() -> None:
    table = {"num_speculative_tokens_per_batch_size": RANGES}
    check("llama", {"method": "ngram", **table, **LOOKUP}, ("respawn",))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("method", ["suffix", "adaptive", *METHODS])
def test_other_drafters(method: str, tmp_path: pathlib.Path) -> None:
    model, setting = "llama", ADAPTIVE
    if method == "suffix":
        setting = {"method": "suffix", "num_speculative_tokens": 3}
    elif method in METHODS:
        model, setting = setting_of(method, tmp_path)
    check(model, setting, ("retry", "respawn", "both"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_two_ranks(tmp_path: pathlib.Path) -> None:
    """`data_parallel_size` 2: both speculate, and the one whose worker is killed does so again.
    The requests end one after the other, as three rows together have no drafts."""
    requests = [
        msgspec.structs.replace(wire, params=msgspec.structs.replace(wire.params, max_tokens=most))
        for wire, most in zip(requests_of(random.Random(3)), (8, 20, 32), strict=True)
    ]
    want = ids_of(run(oracle_engine(), requests))
    model, setting = setting_of("eagle", tmp_path)
    repair = {"data_parallel_size": 2, "fault_tolerance_config": {"auto_recover": "respawn"}}
    config = settings_of(model, setting, **repair)
    llm = await AsyncLLM.start(config, skip_tokenizer_init=True)
    try:
        for _ in range(2):
            before = drafted(llm)
            asked = [(wire, rank) for rank in (0, 1) for wire in requests]
            got = await asyncio.gather(*(answer(llm, *one) for one in asked))
            for (wire, _), tokens in zip(asked, got, strict=True):
                assert tokens == want[wire.request_id]
            # the counters come a little later
            await until(lambda old=before: min(np.subtract(drafted(llm), old)) > 10)
            pid = llm.engine_pids[1]
            for child in psutil.Process(pid).children():
                if "jaxengine::worker" in " ".join(child.cmdline()):
                    child.kill()
            await until(lambda: llm.board.ranks[1].state != "healthy")
            await until(lambda: llm.board.ranks[1].state == "healthy")
    finally:
        await llm.shutdown()


def drafted(llm: AsyncLLM) -> list[float]:
    """Drafted tokens of each rank so far."""
    stats = [series.last_stats for series in llm.metrics._ranks.values()]
    return [one.extra.get("spec_num_draft_tokens", 0.0) for one in stats]


async def answer(llm: AsyncLLM, wire: EngineRequest, rank: int) -> list[int]:
    tokens: list[int] = []
    async for output in llm.generate(
        wire.prompt_token_ids, wire.params, kind="delta", placement=Placement(rank)
    ):
        tokens += output.outputs[0].token_ids
    return tokens


async def until(check: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.05)
