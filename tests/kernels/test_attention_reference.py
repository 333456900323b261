"""XLA reference of paged attention against float64, and the plan against its invariants."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.pallas_kernels.paged_attention import api
from jaxengine.pallas_kernels.paged_attention import plan as pn
from jaxengine.pallas_kernels.paged_attention.config import AttentionConfig

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from attention_cases import Case, build, relative


@st.composite
def row(draw: st.DrawFn, page: int) -> tuple[int, int]:
    q_len = draw(st.sampled_from([0, 1, 1, 2, 17]))
    edge = page * draw(st.integers(0, 6)) + draw(st.integers(-1, 1))
    return q_len, 0 if q_len == 0 else max(q_len, edge)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page = draw(st.sampled_from([8, 16, 32, 64, 128]))
    group = draw(st.integers(1, 16))
    rows = tuple(draw(st.lists(row(page), min_size=1, max_size=4)))
    return Case(
        rows if any(r[0] for r in rows) else ((1, 1),),
        group=group,
        kv_heads=1 if group > 8 else 2,
        dim=draw(st.sampled_from([64, 80, 96, 128, 192, 256])),
        page=page,
        window=draw(st.sampled_from([0, 0, 1, page, 70])),
        soft_cap=draw(st.sampled_from([0.0, 20.0])),
        sinks=draw(st.booleans()),
        fp8=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        extra_tokens=draw(st.integers(0, 2)),
    )


@settings(max_examples=5, deadline=None)
@given(cases())
def test_reference_is_float64s(case: Case) -> None:
    b = build(case)
    got = api.paged_attention(
        b.q,
        b.kv,
        jnp.asarray(b.table),
        jnp.asarray(b.q_start),
        jnp.asarray(b.kv_len),
        scale=case.scale,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=None if b.sinks is None else jnp.asarray(b.sinks),
        kv_scales=None if b.kv_scales is None else jnp.asarray(b.kv_scales),
        backend="xla",
        num_sms=4,
    )
    assert relative(got, b.expected) < 1e-5


def check_plan(plan: pn.AttentionPlan, kv_heads: int) -> int:
    """Every unit of every run is done once, and split runs are merged in order. Splits found."""
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for cta, c in enumerate(plan.ctas):
        for k in range(c[pn.NUM_RUNS]):
            run = c[pn.FIRST_RUN] + k
            tile = plan.tiles[run // kv_heads]
            start = tile[pn.START] + (run % kv_heads) * tile[pn.UNITS]
            a, b = max(c[pn.LOW] - start, 0), min(c[pn.HIGH] - start, tile[pn.UNITS])
            assert a < b
            parts.setdefault(run, []).append((a, b, 2 * cta + (k > 0)))
    for run in range(len(plan.tiles) * kv_heads):
        done = parts.get(run, [])
        units = plan.tiles[run // kv_heads, pn.UNITS]
        assert [a for a, _, _ in done] == [0, *(b for _, b, _ in done[:-1])][: len(done)]
        assert (done[-1][1] if done else 0) == units
        mergers = np.flatnonzero(plan.ctas[:, pn.MERGE_RUN] == run)
        assert len(mergers) == (len(done) > 1)
        for m in mergers:
            later = [2 * c for c in range(m + 1, plan.ctas[m, pn.MERGE_LAST] + 1)]
            assert [plan.ctas[m, pn.MERGE_SLOT], *later] == [slot for _, _, slot in done]
    return sum(len(p) > 1 for p in parts.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=8),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 4, 132]),
    st.sampled_from([0, 70]),
    st.booleans(),
)
def test_plan_does_all_work_once(
    rows: list[tuple[int, int]], tile_tokens: int, heads: int, ctas: int, window: int, split: bool
) -> None:
    q_len = np.array([q for q, _ in rows])
    kv_len = np.array([q and q + k for q, k in rows], np.int32)
    q_start = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    tiles = max(1, pn.max_tiles(int(q_start[-1]), len(rows), tile_tokens))
    plan = pn.plan_attention(
        q_start,
        kv_len,
        tile_tokens=tile_tokens,
        kv_heads=heads,
        block_kv=64,
        num_ctas=ctas,
        num_tiles=tiles,
        window=window,
        split=split,
    )
    splits = check_plan(plan, heads)
    assert split or splits == 0


def plan_of(lengths: list[int], xp: object = np, split: bool = True) -> pn.AttentionPlan:
    n = len(lengths)
    return pn.plan_attention(
        np.arange(n + 1, dtype=np.int32),
        np.array(lengths, np.int32),
        tile_tokens=16,
        kv_heads=2,
        block_kv=64,
        num_ctas=16,
        num_tiles=n,
        split=split,
        xp=xp,
    )


def test_long_row_is_shared_evenly() -> None:
    plan = plan_of([200_000])
    assert check_plan(plan, 2) > 0
    work = plan.ctas[:, pn.HIGH] - plan.ctas[:, pn.LOW]
    assert work.min() > 0.9 * work.max()


def test_plan_is_the_same_in_jnp() -> None:
    lengths = [1, 5000, 70, 64, 65, 0, 12_345]
    for split in (True, False):
        for a, b in zip(plan_of(lengths, np, split), plan_of(lengths, jnp, split), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))


def test_many_long_rows_stay_within_int32() -> None:
    rows, keys, heads, ctas = 512, 1_000_000, 128, 264
    how: dict[str, Any] = {"tile_tokens": 1, "kv_heads": heads, "block_kv": 64, "num_ctas": ctas}
    args = np.arange(rows + 1, dtype=np.int32), np.full(rows, keys, np.int32)
    host = pn.plan_attention(*args, num_tiles=rows, **how)
    device = pn.plan_attention(*args, num_tiles=rows, xp=jnp, **how)
    for a, b in zip(host, device, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
    units = heads * (1 + keys // 64)  # of a row, on the line of work
    assert host.tiles[-1, pn.START] == (rows - 1) * units
    assert host.ctas[-1, pn.HIGH] == rows * units
    assert (host.ctas[1:, pn.LOW] == host.ctas[:-1, pn.HIGH]).all()


def test_unsplit_result_of_a_row_ignores_its_neighbours() -> None:
    alone, together = plan_of([5000], split=False), plan_of([5000, 9000, 70], split=False)
    assert check_plan(alone, 2) == check_plan(together, 2) == 0
    np.testing.assert_array_equal(alone.tiles[0, : pn.START], together.tiles[0, : pn.START])


def test_bad_shapes_are_named() -> None:
    q, kv = jnp.zeros((1, 3, 64)), jnp.zeros((2, 2, 2, 16, 64))
    args = (jnp.zeros((1, 1), jnp.int32), jnp.array([0, 1]), jnp.array([1]))
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        api.paged_attention(q, kv, *args)
    with pytest.raises(ValueError, match="queries are float32"):
        api.paged_attention(jnp.zeros((1, 4, 64)), kv, *args, backend="mosaic")
    with pytest.raises(ValueError, match="width 80 is no multiple of 32"):
        narrow = jnp.zeros((2, 2, 2, 16, 80), jnp.float8_e4m3fn)
        api.paged_attention(jnp.zeros((1, 4, 80), jnp.bfloat16), narrow, *args, backend="mosaic")
    with pytest.raises(ValueError, match="not an NVIDIA GPU"):
        b16 = jnp.bfloat16
        api.paged_attention(jnp.zeros((1, 4, 64), b16), kv.astype(b16), *args, backend="mosaic")
    with pytest.raises(ValueError, match="backend must be one of"):
        api.paged_attention(jnp.zeros((1, 4, 64)), kv, *args, backend="triton")


def test_shared_memory_of_default_configs_fits() -> None:
    for dim in (64, 80, 96, 128, 192, 256):
        for tokens, extras in ((1, False), (1, True), (500, False), (500, True)):
            for fp8 in (False, True):
                config = api.default_config(dim, tokens, 4, fp8, extras=extras)
                assert config.shared_bytes(dim, 1 if fp8 else 2) < 227 * 1024
    assert AttentionConfig(2, 128, 2, 1).rows == 128
