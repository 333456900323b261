"""Ranks that share experts: one group of jax.distributed, stepping together, failing together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.front.async_llm import AsyncLLM, Placement, UnavailableError
from jaxengine.sampling_params import SamplingParams

GOLDEN = GOLDENS / "mixtral"
CASES = json.loads((GOLDEN / "golden.json").read_text())["cases"]
STEP_TIMEOUT = 5.0
SETTINGS: dict[str, Any] = {
    "model": str(GOLDEN),
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_logprobs": 5,
    "warmup": "background",
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_fault_tolerance": True,
}


class Rig:
    """A running group, and every process that it ever had."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self.family: set[psutil.Process] = set()
        self.remember()

    def remember(self) -> None:
        for pid in self.engine.engine_pids.values():
            if pid is not None and psutil.pid_exists(pid):
                one = psutil.Process(pid)
                self.family |= {one, *one.children(recursive=True)}

    async def ask(
        self, number: int, rank: int | None, tokens: int | None = None, **params: Any
    ) -> tuple[list[int], str]:
        """Greedy ids of a case and how it ended; `tokens` beyond the case's go on and on."""
        case = CASES[number]
        count = tokens or len(case["greedy"])
        params = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True} | params
        ids: list[int] = []
        reason = ""
        async for output in self.engine.generate(
            case["prompt"], SamplingParams(**params), kind="delta", placement=Placement(rank)
        ):
            ids += output.outputs[0].token_ids
            reason = str(output.outputs[0].finish_reason)
        return ids, reason

    async def check(self, number: int, rank: int) -> None:
        ids, reason = await asyncio.wait_for(self.ask(number, rank), 120)
        assert (ids, reason) == (CASES[number]["greedy"], "length")

    async def check_all(self) -> None:
        await asyncio.gather(*(self.check(i, i % 2) for i in range(len(CASES))))

    async def dummies(self) -> float:
        await asyncio.sleep(0.6)  # the next stats
        return self.engine.metrics.totals.stats.extra["dp_dummy_steps"]

    def states(self) -> list[str]:
        return [health.state for health in self.engine.board.ranks.values()]

    def worker(self, rank: int) -> psutil.Process:
        self.remember()
        engine = psutil.Process(self.pid(rank))
        return next(p for p in engine.children() if "worker" in " ".join(p.cmdline()))

    def pid(self, rank: int) -> int:
        pid = self.engine.engine_pids[rank]
        assert pid is not None
        return pid

    async def broken(self, fault: Callable[[], object], seconds: float = 5.0) -> None:
        """Clients on both ranks end in time after the fault, with what they have."""
        clients = [
            asyncio.create_task(self.ask(i % len(CASES), i % 2, tokens=100)) for i in range(6)
        ]
        await asyncio.sleep(0.4)
        fault()
        began = time.monotonic()
        done, hanging = await asyncio.wait(clients, timeout=seconds)
        assert not hanging, f"{len(hanging)} clients hang; {self.states()}"
        waited = time.monotonic() - began
        for number, client in enumerate(clients):
            ids, reason = client.result()
            assert reason in ("abort", "length")
            known = CASES[number % len(CASES)]["greedy"]
            assert ids[: len(known)] == known[: len(ids)]
        assert any(client.result()[1] == "abort" for client in clients)
        await until(lambda: all(state == "dead" for state in self.states()), 5)
        with pytest.raises(UnavailableError):
            await self.ask(0, 0)
        print(f"\nclients ended {waited:.2f} s after the fault")

    async def ordered(self, instruction: str, rank: int) -> dict[str, Any]:
        order = self.engine.orders.apply({"instruction": instruction, "params": {"rank": rank}})
        await until(lambda: order.payload()["status"] == "done", 60)
        return order.payload()

    async def respawned(self, rank: int) -> None:
        began = time.monotonic()
        answer = await self.ordered("respawn", rank)
        assert answer["success"], answer
        assert self.states() == ["healthy", "healthy"]
        print(f"respawned in {time.monotonic() - began:.2f} s")
        self.remember()
        await self.check_all()


async def until(check: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)


async def with_group(work: Callable[[Rig], Awaitable[None]], **settings: Any) -> None:
    """Run `work` on a group of two, and see to it that no process is left."""
    fault = {"step_timeout_sec": STEP_TIMEOUT} | settings.pop("fault_tolerance_config", {})
    config = EngineConfig.of(**SETTINGS | settings, fault_tolerance_config=fault)
    began = time.monotonic()
    engine = await AsyncLLM.start(config, skip_tokenizer_init=True)
    rig = Rig(engine)
    print(f"\nstarted in {time.monotonic() - began:.1f} s")
    try:
        await work(rig)
        rig.remember()
    finally:
        await engine.shutdown()
    _, left = psutil.wait_procs(rig.family, timeout=5)
    assert not left


async def life(rig: Rig) -> None:
    """Steps together: equal ids, dummy batches, waves; then a hang, and a new group."""
    await rig.check(0, 0)  # the other rank is woken
    assert await rig.dummies() > 0
    await rig.check(0, 1)
    await rig.check_all()
    before = await rig.dummies()
    assert await rig.dummies() == before  # nobody has work: the wave has ended
    await rig.check(1, 1)  # a new one
    assert (await rig.ordered("retry", 0))["success"] is False
    with pytest.raises(RuntimeError, match="cannot sleep"):
        await rig.engine.sleep()

    hanging = rig.worker(1)
    await rig.broken(hanging.suspend, STEP_TIMEOUT + 5)
    refused = await rig.ordered("retry", 1)
    assert "respawn replaces them all" in refused["results"][0]["reason"]
    await rig.respawned(0)

    await rig.engine.call("check_integrity")

    # The end comes in the middle of a wave.
    clients = [asyncio.create_task(rig.ask(i, i % 2, tokens=90)) for i in range(4)]
    await asyncio.sleep(0.2)
    rig.remember()
    began = time.monotonic()
    await rig.engine.shutdown()
    print(f"shut down in {time.monotonic() - began:.2f} s")
    await asyncio.gather(*clients, return_exceptions=True)


@pytest.mark.timeout(600)
async def test_two_ranks_live_and_die_together() -> None:
    await with_group(life)


async def other_faults(rig: Rig) -> None:
    """A worker that dies, an engine that hangs, a worker that dies while all sleep; rank 0's."""
    await rig.broken(rig.worker(1).kill)
    await rig.respawned(1)

    stopped = psutil.Process(rig.pid(1))
    await rig.broken(stopped.suspend, STEP_TIMEOUT + 5)
    await rig.respawned(0)

    await asyncio.sleep(0.5)
    rig.worker(0).kill()
    await until(lambda: rig.states() == ["dead", "dead"], 5)
    await rig.respawned(0)

    pid = rig.pid(0)
    await rig.broken(lambda: os.kill(pid, signal.SIGKILL))
    await rig.respawned(0)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_hangs_and_deaths_of_every_kind() -> None:
    await with_group(other_faults, warmup="full")


async def features(rig: Rig) -> None:
    """What needs programs of its own, on one rank only, beside plain requests on the other."""
    prompt = CASES[-1]["prompt"]
    allowed = [5, 6, 7]

    async def narrow() -> None:
        ids, _ = await rig.ask(0, 0, tokens=12, allowed_token_ids=allowed)
        assert len(ids) == 12 and set(ids) <= set(allowed)

    async def scored() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, logprobs=1)
        async for output in rig.engine.generate(
            prompt, params, kind="final", placement=Placement(1)
        ):
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(prompt)
            best = output.outputs[0].logprobs
            assert best is not None

    await asyncio.gather(narrow(), rig.check(1, 1), rig.check(2, 0), scored())
    await rig.check_all()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_shards_in_every_rank_while_programs_compile() -> None:
    await with_group(features, attention_data_parallel_size=2)


async def comes_back(rig: Rig) -> None:
    """Planned faults: one worker raises, then the engine of a rank; nobody orders anything, and
    the clients see a pause."""
    for faults in (1, 2):
        clients = [rig.ask(i, None, tokens=80) for i in range(4)]
        for number, (ids, reason) in enumerate(await asyncio.gather(*clients)):
            known = CASES[number]["greedy"]
            assert ids[: len(known)] == known and (len(ids), reason) == (80, "length")
        assert [h.epoch for h in rig.engine.board.ranks.values()] == [faults, faults]
        await until(lambda: rig.states() == ["healthy", "healthy"], 60)
        await rig.check_all()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_planned_faults_and_automatic_recovery() -> None:
    faults = [
        {"rank": 1, "step": 40, "kind": "raise"},
        {"rank": 0, "step": 200, "kind": "raise", "where": "engine"},
    ]
    await with_group(
        comes_back,
        fault_tolerance_config={"auto_recover": "respawn"},
        retry_aborted_requests=True,
        inject_faults=json.dumps(faults),
    )


async def drill(rig: Rig) -> None:
    """Faults at any moment, also while the group is being formed: whoever asks gets the truth or an
    end, and an order brings all back in the end."""
    rng = random.Random(5)
    stop = asyncio.Event()
    ends: Counter[str] = Counter()

    async def client(number: int) -> None:
        while not stop.is_set():
            case, rank = rng.randrange(len(CASES)), rng.randrange(2)
            try:
                ids, reason = await self_or_timeout(rig.ask(case, rank))
            except UnavailableError:
                ends["503"] += 1
                await asyncio.sleep(0.05)
                continue
            known = CASES[case]["greedy"]
            assert ids == known[: len(ids)] and reason in ("length", "abort"), (number, ids, reason)
            assert reason == "abort" or ids == known
            ends[reason] += 1

    async def self_or_timeout(work: Any) -> Any:
        async with asyncio.timeout(STEP_TIMEOUT + 60):
            return await work

    def shoot() -> None:
        rank = rng.randrange(2)
        pid = rig.pid(rank)
        rig.remember()
        if not psutil.pid_exists(pid):
            return
        target = psutil.Process(pid)
        if rng.random() < 0.6:
            target = next(iter(target.children()), target)
        with contextlib.suppress(psutil.NoSuchProcess):
            target.kill()

    load = [asyncio.create_task(client(i)) for i in range(6)]
    for _ in range(6):
        enough = ends["length"] + 4
        await until(lambda enough=enough: ends["length"] >= enough, 60)  # type: ignore[misc]
        await asyncio.sleep(0.3 * rng.random())
        shoot()
        await until(lambda: "healthy" not in rig.states(), 10)
        order = asyncio.create_task(rig.ordered("respawn", rng.randrange(2)))
        if rng.random() < 0.7:
            await asyncio.sleep(5 * rng.random())
            shoot()
        await order
        for _ in range(5):  # what was shot meanwhile comes back with the next order
            if rig.states() == ["healthy", "healthy"]:
                break
            await rig.ordered("respawn", rng.randrange(2))
        for task in load:
            if task.done():
                task.result()
    await until(lambda: rig.states() == ["healthy", "healthy"], 5)
    stop.set()
    await asyncio.gather(*load)
    await rig.check_all()
    print(f"\n{dict(ends)}")
    assert ends["abort"]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_faults_at_any_moment() -> None:
    await with_group(drill)
