"""Traces are read as they are written, arrivals have the rate asked for, prompts share prefixes."""

from __future__ import annotations

import itertools
import json
import pathlib

import numpy as np
import pytest
import testdata

from jaxengine.lab.bench.datasets import (
    BenchRequest,
    arrivals,
    arrivals_at,
    load_trace,
    prompt_tokens,
    ramp,
)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_rate_and_burstiness(burstiness: float) -> None:
    times = arrivals(20_001, 50.0, burstiness, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.min() >= 0
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.06)
    # A gamma distribution's squared coefficient of variation is 1 / shape.
    assert np.var(gaps) / np.mean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.15)
    assert times == arrivals(20_001, 50.0, burstiness, seed=3)
    assert times != arrivals(20_001, 50.0, burstiness, seed=4)


def test_arrivals_at_once_and_few() -> None:
    assert arrivals(3, float("inf")) == [0, 0, 0]
    assert arrivals(0, 1.0) == [] and arrivals(1, 1.0) == [0]
    with pytest.raises(ValueError, match="above 0"):
        arrivals(3, 0.0)
    with pytest.raises(ValueError, match="above 0"):
        arrivals(3, 1.0, burstiness=float("nan"))


def test_ramps() -> None:
    assert ramp(3, 1, 9, "linear") == [1, 5, 9]
    assert ramp(3, 1, 9, "exponential") == pytest.approx([1, 3, 9])
    times = arrivals_at(ramp(4000, 1, 9, "linear"), burstiness=50)
    gaps = np.diff(times)
    assert np.mean(gaps[:200]) == pytest.approx(1 / 1.2, rel=0.1)
    assert np.mean(gaps[-200:]) == pytest.approx(1 / 8.8, rel=0.1)


def write(path: pathlib.Path, rows: list[dict[str, object]]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_trace(tmp_path: pathlib.Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 2500, "input_length": 33, "output_length": 4, "hash_ids": [0, 1]},
        {"timestamp": 1000, "input_length": 40, "output_length": 0, "hash_ids": [0, 2]},
    ]
    requests = load_trace(write(tmp_path / "t.jsonl", rows))
    assert requests == [
        BenchRequest(0.0, (), 40, 1, None, 16, (0, 2)),
        BenchRequest(1.5, (), 33, 4, None, 16, (0, 1)),
    ]
    first, second = (prompt_tokens(r, seed=7) for r in requests)
    assert len(first) == 40 and len(second) == 33
    assert first[:16] == second[:16] and first[16:32] != second[16:32]
    assert prompt_tokens(requests[0], seed=7) == first != prompt_tokens(requests[0], seed=8)


def test_partial_block_and_sessions(tmp_path: pathlib.Path) -> None:
    rows: list[dict[str, object]] = [
        {"session": 4, "timestamp": 10, "input_length": 700, "output_length": 1, "hash_ids": [8, 9]}
    ]
    (request,) = load_trace(write(tmp_path / "t.jsonl", rows), block_size=512)
    assert request.arrival == 0.01 and request.session == "4"  # a session has its own clock
    assert len(prompt_tokens(request)) == 700


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.4799600,110,27"],
        ),
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            ["5,ChatGPT,4808,10,4818,Conversation log", "5.5,ChatGPT,110,27,137,API log"],
        ),
    ],
)
def test_csv_trace(tmp_path: pathlib.Path, header: str, rows: list[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    first, second = load_trace(path)
    assert (first.arrival, first.prompt_len, first.output_len) == (0, 4808, 10)
    assert second.arrival == pytest.approx(0.5) and second.prompt_len == 110


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ('{"timestamp": 1, "input_length": 2}', "line 1: 'output_length' is missing"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 2}', "line 1: .*make no sense"),
        ("[1]", "line 1"),
        ("nothing", "line 1"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": [1,2,3,4,5,6]}',
            "fit no block size",
        ),
    ],
)
def test_broken_traces(tmp_path: pathlib.Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"t\.jsonl.*{message}"):
        load_trace(path)


def test_missing_trace_and_columns(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="there is no trace"):
        load_trace(tmp_path / "no.jsonl")
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="its columns must include TIMESTAMP"):
        load_trace(tmp_path / "t.csv")


def test_published_traces() -> None:
    """Totals and the hits of an unlimited cache, as worked out apart from this reader."""
    expected = json.loads(testdata.trace("expected.json").read_text())
    for name, figures in expected.items():
        requests = load_trace(testdata.trace(name))
        assert len(requests) == figures["requests"]
        assert sum(r.prompt_len for r in requests) == figures["input_tokens"]
        if "block_size" not in figures:
            continue
        assert {r.block_size for r in requests} == {figures["block_size"]}
        seen: set[int] = set()
        hits = 0
        for request in requests:
            ids = request.block_ids
            hits += len(list(itertools.takewhile(seen.__contains__, ids)))
            seen.update(ids)
        assert hits == figures["unlimited_cache"]["hit_blocks"]
