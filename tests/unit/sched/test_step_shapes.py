"""Which shape a step with drafts runs in, as two microbatches or not, and how that is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxengine.runner.programs import Key, _own
from jaxengine.sched.batch import Bucket
from jaxengine.sched.buckets import Overlap
from jaxengine.sched.shapes import OverlapCounts, VerifyChooser
from jaxengine.sched.verify_batch import verify_bucket

SHAPES = [(1, 3), (4, 3)]
SMALL, LARGE = (verify_bucket(*shape) for shape in SHAPES)
HALVES = replace(LARGE, dbo=True)


def test_drafts_count_as_tokens_of_a_decode_step() -> None:
    """Case B64: below the threshold of decode steps a step with drafts runs whole."""
    chooser = VerifyChooser(SHAPES, "lazy", lambda key: False, Overlap(9, 512))
    assert chooser.choose(1, 3) == SMALL  # 4 tokens
    assert chooser.choose(2, 3) == LARGE  # 8 of its 16 places
    assert chooser.choose(3, 3) == HALVES  # 12
    assert VerifyChooser(SHAPES, "lazy", lambda key: False).choose(4, 3) == LARGE  # overlap is off


@pytest.mark.parametrize(
    ("ready", "chosen", "outcome"),
    [
        ([LARGE, HALVES], HALVES, "steps"),
        ([LARGE], LARGE, "not_compiled"),
        ([HALVES], None, None),
        ([], None, None),
    ],
)
def test_a_step_does_not_wait_for_its_halves(
    ready: list[Bucket], chosen: Bucket | None, outcome: str | None
) -> None:
    chooser = VerifyChooser(
        SHAPES, "full", lambda key: key[0] == "verify" and key[1] in ready, Overlap(9, 512)
    )
    assert chooser.choose(4, 3) == chosen
    if chosen is not None:
        assert chooser.outcome(chosen) == outcome
        assert chooser.outcome(chosen) is None  # a step counts once


def test_a_shape_that_was_dropped_does_not_count() -> None:
    chooser = VerifyChooser(SHAPES, "lazy", lambda key: False, Overlap(2, 2))
    counts = OverlapCounts()
    chooser.choose(4, 3)  # then nothing was drafted, and a step without drafts runs
    assert chooser.outcome(Bucket(4, 4, True)) is None
    chosen = chooser.choose(4, 3)
    assert chosen is not None
    outcome = chooser.outcome(chosen)
    assert outcome is not None
    counts.add(outcome)
    assert counts.stats() == {
        "dbo_steps": 1.0, "dbo_off_below_threshold": 0.0, "dbo_off_not_compiled": 0.0
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["lookup", "draft", "accept", "follow"])
def test_only_the_models_layers_are_compiled_for_halves(kind: Any) -> None:
    assert _own(Key(kind, HALVES)) == Key(kind, LARGE)
    assert _own(Key("verify", HALVES)) == Key("verify", HALVES)
    assert _own(Key("forward", HALVES)) == Key("forward", HALVES)
    assert _own(Key("sample", 4)) == Key("sample", 4)
