"""Prefix hits on a real trace against counts worked out apart from the engine."""

from __future__ import annotations

import dataclasses
import json

import pytest
import testdata
from constant_device import cluster

from jaxengine.lab.bench.datasets import load_trace
from jaxengine.lab.simulate.cluster import simulate
from jaxengine.lab.simulate.outcome import RankFigures
from jaxengine.lab.simulate.tiers import TierConfig

NAME = "sharegpt_rows_1-200.jsonl"
BLOCK, PAGE = 16, 64


def run(num_blocks: int, host_blocks: int = 0) -> RankFigures:
    """Requests one by one, in the file's order, without outputs that would take blocks."""
    requests = [dataclasses.replace(r, output_len=1) for r in load_trace(testdata.trace(NAME))]
    sizes = {"block_size": BLOCK, "num_blocks": num_blocks, "max_model_len": 4096}
    tier = TierConfig(host_blocks * PAGE / 2**30, (PAGE,)) if host_blocks else None
    made = cluster(tier=tier, max_num_batched_tokens=8192, **sizes)
    outcome = simulate(made, requests, max_concurrency=1)
    assert all(len(record.times) == 1 for record in outcome.records)
    return outcome.ranks[0]


def expected(capacity: int | None) -> int:
    of = json.loads(testdata.trace("expected.json").read_text())[NAME]
    if capacity is None:
        return int(of["unlimited_cache"]["hit_blocks"])
    return next(row["hit_blocks"] for row in of["lru"] if row["capacity_blocks"] == capacity)


def test_hits_of_a_cache_that_never_forgets() -> None:
    """Two prompts are cached whole: their last token is computed again, with its block."""
    assert expected(None) - 2 <= run(20_000).prefix_hits / BLOCK <= expected(None)


def test_hits_of_a_small_pool_and_of_host_memory_behind_it() -> None:
    """LRU caches contain one another: host memory of 2,000 blocks finds what a cache of 2,000
    blocks would, whatever the device in front of it holds."""
    small, both = run(500), run(500, host_blocks=2000)
    assert small.prefix_hits / BLOCK == pytest.approx(expected(500), abs=6)
    assert both.host_hits > 0
    assert (both.prefix_hits + both.host_hits) / BLOCK == pytest.approx(expected(2000), abs=6)
