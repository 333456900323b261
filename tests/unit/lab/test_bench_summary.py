"""Figures of a load by hand, and made-up data sets."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxengine.lab.bench.client import Trace
from jaxengine.lab.bench.datasets import BenchRequest
from jaxengine.lab.bench.prompts import (
    custom_requests,
    prefix_repetition,
    random_requests,
    sharegpt_requests,
    words_of,
)
from jaxengine.lab.bench.summary import summarize, table


def trace(ttft: float, gap: float, tokens: int) -> Trace:
    """A request that begins at 10 s and gets a token every `gap` seconds."""
    first = 10 + ttft
    return Trace(
        prompt_len=5,
        started=10,
        first=first,
        last=first + gap * (tokens - 1),
        gaps=[gap] * (tokens - 1),
        num_tokens=tokens,
    )


def test_figures_by_hand() -> None:
    traces = [trace(0.1, 0.02, 3), trace(0.3, 0.04, 2), trace(0.2, 0, 1), Trace(5, error="lost")]
    figures = summarize(traces, 2.0, percentiles=(50, 99.9), limits={"ttft": 250, "tpot": 30})
    assert figures["completed"] == 3 and figures["failed"] == 1 and figures["errors"] == ["lost"]
    assert figures["total_input_tokens"] == 15 and figures["total_output_tokens"] == 6
    assert figures["request_throughput"] == 1.5 and figures["output_throughput"] == 3
    assert figures["total_token_throughput"] == 10.5
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["p50_ttft_ms"] == figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx(30)  # of the two with more than one token
    assert figures["mean_itl_ms"] == pytest.approx(80 / 3)
    assert figures["mean_e2el_ms"] == pytest.approx((140 + 340 + 200) / 3)
    assert "p99.9_e2el_ms" in figures
    assert figures["request_goodput"] == 1 and figures["good_share"] == 0.5
    assert any("TPOT" in line and "30.00" in line for line in table(figures))


def test_nothing_completed() -> None:
    figures = summarize([Trace(5, error="lost")], 1.0)
    assert figures["completed"] == 0 and "mean_ttft_ms" not in figures
    assert table(figures)[0] == "0 requests in 1.00 s, 1 failed"


def test_random_lengths_and_prefix() -> None:
    requests = random_requests(200, 100, 40, range_ratio=0.5, prefix_len=7, seed=3)
    lengths = [len(r.prompt) for r in requests]
    assert [r.prompt_len for r in requests] == lengths
    assert 57 <= min(lengths) < 70 and 140 < max(lengths) <= 157
    assert {r.output_len for r in requests} <= set(range(20, 61))
    assert len({r.prompt[:7] for r in requests}) == 1 and len({r.prompt[:9] for r in requests}) > 1
    assert requests == random_requests(200, 100, 40, range_ratio=0.5, prefix_len=7, seed=3)


def test_prefixes_repeat_evenly() -> None:
    requests = prefix_repetition(30, 8, 4, num_prefixes=3, output_len=2)
    heads = [r.prompt[:8] for r in requests]
    assert {heads.count(head) for head in heads} == {10} and len(set(heads)) == 3
    assert len({r.prompt for r in requests}) == 30


def test_sharegpt(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.json"

    def talk(question: int, answer: int) -> dict[str, object]:
        texts = ("q " * question, "a " * answer)
        sides = ("human", "gpt")
        return {
            "conversations": [{"from": f, "value": v} for f, v in zip(sides, texts, strict=True)]
        }

    path.write_text(json.dumps([talk(10, 20), talk(2, 20), talk(2000, 20), {"conversations": []}]))
    words = lambda text: len(text.split())  # noqa: E731
    (only, again) = sharegpt_requests(path, 2, words)
    assert only == again == BenchRequest(0.0, "q " * 10, 10, 20)
    assert sharegpt_requests(path, 1, words, output_len=3)[0].output_len == 3
    path.write_text("[1]")
    with pytest.raises(ValueError, match="no list of conversations"):
        sharegpt_requests(path, 1, words)
    with pytest.raises(ValueError, match="there is no file"):
        sharegpt_requests(tmp_path / "none.json", 1, words)


def test_custom(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "a b", "output_tokens": 5}\n\n{"prompt": "c"}\n')
    requests = custom_requests(path, 2, len, output_len=9)
    assert {(r.prompt, r.prompt_len, r.output_len) for r in requests} == {
        ("a b", 3, 5),
        ("c", 1, 9),
    }
    path.write_text('{"text": "a b"}\n')
    with pytest.raises(ValueError, match="line 1: no object with a prompt"):
        custom_requests(path, 2, len, output_len=9)


def test_words_keep_prefixes() -> None:
    assert words_of([1, 2, 3]).split() == words_of([1, 2, 4]).split()[:2] + [words_of([3])]
