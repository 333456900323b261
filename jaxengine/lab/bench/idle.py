"""How long the device waits for the host: synchronous against asynchronous scheduling."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.lab.tap import tapped
from jaxengine.sampling_params import SamplingParams
from jaxengine.sched.executor import Batch
from jaxengine.wire.messages import EngineRequest

REPLAYS = 12


def device_idle(model: str, num_requests: int, output_len: int = 48) -> list[dict[str, Any]]:
    """Decode steps of `num_requests` requests, once at depth 1 and once at depth 2.

    Device time is that of the same packed batch dispatched again and again with no host work in
    between; the idle share is what a step takes beyond it. Times in milliseconds.
    """
    return [_measure(model, num_requests, output_len, deep) for deep in (False, True)]


def _measure(model: str, count: int, output_len: int, deep: bool) -> dict[str, Any]:
    core = EngineCore(
        EngineConfig.of(
            model=model,
            max_num_seqs=count,
            max_num_batched_tokens=max(256, count),
            max_model_len=16 + output_len + 1,
            async_scheduling=deep,
            warmup="lazy",
        )
    )
    try:
        _decode(core, count, output_len, "warm")  # compiles
        batches: list[Batch] = []

        def noting(submit: Callable[[Batch], Any], batch: Batch) -> Any:
            batches.append(batch)
            return submit(batch)

        before = core.stats().host_seconds
        with tapped(core.executor, submit=noting):
            steps, seconds = _decode(core, count, output_len, "run")
        host = core.stats().host_seconds - before
        decode = [b for b in batches if b.bucket.decode_only][-1]
        device = _replay(core, decode)
    finally:
        core.shutdown()
    step = seconds / steps
    return {
        "scheduling": "async" if deep else "sync",
        "step_ms": 1e3 * step,
        "device_ms": 1e3 * device,
        "host_ms": 1e3 * host / (steps + 1),
        "idle_share": max(0.0, 1 - device / step),
    }


def _decode(core: EngineCore, count: int, output_len: int, name: str) -> tuple[int, float]:
    """Run to the end; steps and seconds of the part in which all requests decode."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for i in range(count):
        prompt = rng.integers(0, core.facts.spec.vocab_size, 16).tolist()
        core.add_request(
            EngineRequest(
                request_id=f"{name}-{i}", prompt_token_ids=prompt, params=params, arrival_time=0.0
            )
        )
    produced = dict.fromkeys(range(count), 0)
    steps, began = 0, 0.0
    while core.has_work():
        outputs = core.step()
        for output in outputs:
            produced[int(output.request_id.split("-")[1])] += len(output.new_token_ids)
        if began and outputs:
            steps += 1
        if not began and min(produced.values()) > 1:
            began = time.perf_counter()
    return steps, time.perf_counter() - began


def _replay(core: EngineCore, batch: Batch) -> float:
    """Seconds a step of back-to-back dispatches."""
    submit = core.executor.submit
    core.executor.result(submit(batch))
    began = time.perf_counter()
    handles = [submit(batch) for _ in range(REPLAYS)]
    core.executor.result(handles[-1])
    return (time.perf_counter() - began) / REPLAYS
