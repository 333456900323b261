"""One batch of prompts through an engine core in this process: what throughput, latency and spec
time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import EngineRequest


@dataclass(frozen=True)
class BatchRun:
    """Times in seconds. The decode figures begin with the first token of the last request:
    `decode_cpu` is the CPU time of all threads of the process."""

    ids: list[list[int]]
    seconds: float
    first: float
    steps: int
    host_seconds: float
    decode_seconds: float
    decode_cpu: float
    decode_tokens: int
    decode_steps: int


def random_prompts(core: EngineCore, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens of the model's vocabulary."""
    rng = np.random.default_rng([seed, count, length])
    vocab = core.facts.spec.vocab_size
    return [rng.integers(0, vocab, length).tolist() for _ in range(count)]


def run_batch(
    core: EngineCore, prompts: Sequence[list[int]], output_len: int | Sequence[int]
) -> BatchRun:
    """All prompts at once, greedy, ignore_eos, from an engine with an empty prefix cache.
    `output_len`: tokens of every output, or of each.

    Raises RuntimeError when a request fails.
    """
    core.scheduler.reset_prefix_cache()
    stats = core.stats()
    steps_before, host_before = stats.num_steps, stats.host_seconds
    lengths = [output_len] * len(prompts) if isinstance(output_len, int) else output_len
    began = time.perf_counter()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        core.add_request(
            EngineRequest(
                request_id=str(i), prompt_token_ids=prompt, params=params, arrival_time=0.0
            )
        )
    ids: list[list[int]] = [[] for _ in prompts]
    first, decoding, cpu, at_start, steps = 0.0, 0.0, 0.0, 0, steps_before
    while core.has_work():
        for output in core.step():
            if output.error:
                raise RuntimeError(output.error)
            first = first or time.perf_counter() - began
            ids[int(output.request_id)] += output.new_token_ids
        if not decoding and all(ids):
            decoding, cpu = time.perf_counter(), time.process_time()
            at_start, steps = sum(map(len, ids)), core.stats().num_steps
    ended, after = time.perf_counter(), core.stats()
    return BatchRun(
        ids=ids,
        seconds=ended - began,
        first=first,
        steps=after.num_steps - steps_before,
        host_seconds=after.host_seconds - host_before,
        decode_seconds=ended - decoding,
        decode_cpu=time.process_time() - cpu,
        decode_tokens=sum(map(len, ids)) - at_start,
        decode_steps=after.num_steps - steps,
    )
