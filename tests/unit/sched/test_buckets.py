"""Which shapes exist, which one a plan runs in, and that warm-up compiles them all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxengine.runner.programs import Key
from jaxengine.runner.warmup import warmup_keys
from jaxengine.sched.buckets import all_buckets, choose, row_buckets
from jaxengine.sched.shapes import StepShapes

SIZES = [(1, 1), (1, 17), (3, 63), (5, 40), (8, 64), (64, 1024), (6, 1000), (8, 8), (300, 317)]


@pytest.mark.parametrize(("seqs", "tokens"), SIZES)
def test_every_plan_has_the_smallest_bucket_and_none_exceeds_the_limits(
    seqs: int, tokens: int
) -> None:
    buckets = all_buckets(seqs, tokens)
    assert max(b.tokens for b in buckets if not b.decode_only) == max(tokens, seqs)
    assert max(b.rows for b in buckets) == seqs
    assert all(b.tokens == b.rows for b in buckets if b.decode_only)
    for rows in range(1, seqs + 1):
        found = choose(buckets, rows, rows, True)
        assert found is not None and found.decode_only and rows <= found.rows < 2 * rows
    for count in range(1, tokens + 1):
        found = choose(buckets, count, min(seqs, count), False)
        fits = [b for b in buckets if not b.decode_only and b.tokens >= count]
        assert found == min(fits, key=lambda b: b.tokens)
        assert found.rows == seqs


@given(st.integers(1, 300), st.integers(1, 3000))
def test_no_bucket_for_more_than_the_limits(seqs: int, more: int) -> None:
    tokens = seqs + more
    buckets = all_buckets(seqs, tokens)
    assert choose(buckets, tokens + 1, 1, False) is None
    assert choose(buckets, seqs + 1, seqs + 1, True) is None
    assert choose(buckets, tokens, seqs + 1, False) is None


@pytest.mark.parametrize(("seqs", "tokens"), SIZES)
def test_warm_up_holds_every_program_once(seqs: int, tokens: int) -> None:
    buckets, sizes = all_buckets(seqs, tokens), row_buckets(seqs)
    keys = warmup_keys(StepShapes(buckets, sizes))
    assert len(set(keys)) == len(keys)
    assert {key.size for key in keys if key.kind == "forward"} == set(buckets)
    assert {key.size for key in keys if key.kind == "sample"} == set(sizes)
    mixed = {b.tokens for b in buckets if not b.decode_only}
    assert {key.size for key in keys if key.kind == "score"} == mixed
    assert {key.size for key in keys if key.kind == "pool"} == mixed
    assert Key("seed") in keys
    assert {key.kind for key in keys} == {"forward", "sample", "score", "seed", "pool"}
    # A decode step samples as many rows as it forwards.
    assert {b.rows for b in buckets if b.decode_only} == set(sizes)
