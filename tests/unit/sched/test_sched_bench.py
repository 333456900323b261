"""The planner's benchmark runs and counts what it says. No limit on time: machines differ."""

from __future__ import annotations

from jaxengine.bench.sched import bench_sched


def test_bench_counts_tokens() -> None:
    rows = bench_sched((4, 8), prompt_len=40, output_len=16)
    assert [row["num_running"] for row in rows] == [4, 8]
    for row in rows:
        assert row["preemptions"] == 0 and row["us_per_request_step"] > 0
        # Three lifetimes of every place, less steps of prefill and surplus steps.
        assert 0.8 * 48 * row["num_running"] < row["tokens"] <= 48 * row["num_running"]
