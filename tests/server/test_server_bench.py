"""`jaxengine bench serve` and `sched`, small."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from serverlib import Server, running

from jaxengine.bench import sched, serve


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """Tokens come one at a time: there are gaps to measure."""
    with running("--max-model-len", "512", step=0.03) as up:
        yield up


def test_bench_serve(
    paced: Server, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    argv = ["--base-url", paced.url, "--num-prompts", "12", "--max-concurrency", "3"]
    argv += ["--random-input-len", "20", "--random-output-len", "7", "--request-rate", "200"]
    assert serve.main([*argv, "--output-json", str(path)]) == 0
    figures: dict[str, Any] = json.loads(path.read_text())
    assert figures["completed"] == 12 and figures["failed"] == 0
    assert figures["input_tokens"] == 240 and figures["output_tokens"] == 84
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        row = figures["latency"][name]
        assert 0 <= row["p50"] <= row["p90"] <= row["p99"]
    assert figures["latency"]["ttft_ms"]["p50"] <= figures["latency"]["e2el_ms"]["p50"]
    assert "TTFT" in capsys.readouterr().out


def test_bench_serve_tells_of_failures(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--base-url", server.url, "--num-prompts", "2", "--model", "nobody"]
    assert serve.main(argv) == 1
    assert "HTTP 404" in capsys.readouterr().out


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
