"""The scheduler's benchmark runs and counts what it says. No limit on time: machines differ."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxengine.lab.bench import sched
from jaxengine.lab.bench.sched import bench_sched


def test_bench_counts_tokens() -> None:
    rows = bench_sched((4, 8), prompt_len=40, output_len=16)
    assert [row["num_running"] for row in rows] == [4, 8]
    for row in rows:
        assert row["preemptions"] == 0 and row["us_per_request_step"] > 0
        # Three lifetimes of every place, less steps of prefill and surplus steps.
        assert 0.8 * 48 * row["num_running"] < row["tokens"] <= 48 * row["num_running"]


def test_bench_sched(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    argv = ["--num-running", "4", "8", "--input-len", "32", "--output-len", "8"]
    assert sched.main([*argv, "--output-json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [r["num_running"] for r in rows] == [4, 8]
    assert all(r["us_per_request_step"] > 0 and r["preemptions"] == 0 for r in rows)
    assert "us/request-step" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sched.main(["--num-running", "0"])
