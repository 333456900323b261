"""Sliding windows under chunks, a cached prefix and a small pool (B72)."""

from __future__ import annotations

import random

import pytest
from engine_runs import alone, engine, fill_kv, ids_of, oracle_engine, prompt_of, request, run

from jaxengine.engine.core import EngineCore

MODEL = "mistral-window"  # every layer sees 24 tokens


@pytest.mark.parametrize("size", [4, 16, 40])
def test_chunks_and_cached_prefixes_under_a_window(size: int) -> None:
    core = engine(model=MODEL, max_num_seqs=1, max_num_batched_tokens=size)
    rng = random.Random(72)
    prompt = prompt_of(rng, 80)
    requests = [
        request("whole", prompt, max_tokens=40),
        request("tail", prompt[:61] + prompt_of(rng, 20), max_tokens=10),  # a diverging tail
        request("short", prompt[:66], max_tokens=40),
        request("again", prompt, max_tokens=40),
        request("other", prompt_of(rng, 100), max_tokens=30),
    ]
    want = ids_of(alone(oracle_engine(MODEL), requests))
    fill_kv(core, float("nan"))  # also behind the window, where blocks are given back
    seen = run(core, requests)
    assert ids_of(seen) == want
    assert seen["tail"].cached > 0 and seen["again"].cached > 0
    assert core.stats().prefix_hits > 0


def test_blocks_behind_the_window_are_given_back() -> None:
    core = engine(model=MODEL, max_num_seqs=1, max_num_batched_tokens=16)
    size = core.facts.sched_sizes.block_size
    most = 0

    def look(core: EngineCore, _step: int) -> None:
        nonlocal most
        most = max(most, round(core.scheduler.kv_usage * core.facts.sched_sizes.num_blocks))

    run(core, [request("x", prompt_of(random.Random(1), 60), max_tokens=80)], look)
    # A window, a chunk and their edges, not 140 tokens.
    assert 0 < most <= (24 + 2 * 16) // size + 3
