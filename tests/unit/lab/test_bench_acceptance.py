"""Acceptance of drafts from pages of metrics."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxengine.lab.bench.acceptance import Drafts, acceptance, acceptance_lines, parse_drafts
from jaxengine.metrics.prometheus import Metrics, with_vllm_names
from jaxengine.wire.messages import EngineStats

OLD = Drafts(10, 30, 12, {0: 8, 1: 3, 2: 1})
NEW = Drafts(14, 42, 18, {0: 11, 1: 5, 2: 2})


def extra(counts: Drafts) -> dict[str, float]:
    names = {
        "spec_num_drafts": counts.drafts,
        "spec_num_draft_tokens": counts.draft_tokens,
        "spec_num_accepted_tokens": counts.accepted,
    }
    return names | {
        f"spec_num_accepted_tokens_pos_{at}": n for at, n in counts.per_position.items()
    }


@pytest.mark.parametrize("names", ["ours", "both", "vllm's"])
def test_pages_of_our_server(names: str) -> None:
    """Of two ranks; a page with both names counts nothing twice."""
    metrics = Metrics("m", ranks=(0, 1))
    metrics.stats(EngineStats(extra=extra(OLD)), 0)
    metrics.stats(EngineStats(extra=extra(NEW)), 1)
    text = metrics.render()
    if names != "ours":
        text = with_vllm_names(text)
    page = text.decode()
    if names == "vllm's":
        page = "\n".join(line for line in page.splitlines() if "jaxengine:" not in line) + "\n"
    assert list(text_string_to_metric_families(page))
    assert parse_drafts(page) == Drafts(24, 72, 30, {0: 19, 1: 8, 2: 3})


def test_figures_by_hand() -> None:
    figures = acceptance(OLD, NEW)
    assert figures == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 4,
        "spec_decode_draft_tokens": 12,
        "spec_decode_accepted_tokens": 6,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.5, 0.25],
    }
    assert acceptance_lines(figures)[1].endswith("75.0% 50.0% 25.0%")
    assert acceptance(None, OLD)["spec_decode_acceptance_rate"] == 40.0


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, None), (OLD, None), (OLD, OLD), (NEW, OLD), (None, Drafts())],
    ids=["no metrics", "gone", "nothing drafted", "began anew", "zeros"],
)
def test_no_figures(before: Drafts | None, after: Drafts | None) -> None:
    assert acceptance(before, after) == {} and acceptance_lines({}) == []


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html>no metrics</html>",
        "process_cpu_seconds_total 1.0\n",
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"} 1\n',
    ],
)
def test_other_pages(page: str) -> None:
    assert parse_drafts(page) is None
