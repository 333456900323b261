"""Latent attention: XLA against float64, the kernel in GPU interpret mode."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels.mla_attention import mla_attention

SCALE = 0.07


def f64(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32)).astype(np.float64)


def build(
    rows: list[tuple[int, int]], heads: int, latent: int, page: int, dtype: Any, seed: int
) -> tuple[tuple[Any, ...], np.ndarray]:
    """Arguments with NaN in every slot that no row owns, and the result in float64."""
    rng = np.random.default_rng(seed)
    dim = latent + 64
    need = [-(-k // page) for _, k in rows]
    blocks = sum(need) + 2
    order = rng.permutation(blocks)
    table = np.full((len(rows), max(need) + 1), order[-1], np.int32)
    cache = jnp.asarray(rng.standard_normal((blocks, page, dim)), jnp.float32).astype(dtype)
    q_start = np.concatenate([[0], np.cumsum([q for q, _ in rows])]).astype(np.int32)
    q = jnp.asarray(rng.standard_normal((int(q_start[-1]), heads, dim)), jnp.float32).astype(dtype)
    owned, used = np.zeros((blocks, page), bool), 0
    want = np.zeros((len(q), heads, latent))
    for i, (q_len, kv_len) in enumerate(rows):
        table[i, : need[i]] = order[used : used + need[i]]
        used += need[i]
        for b in range(need[i]):
            owned[table[i, b], : min(page, kv_len - b * page)] = True
        keys = f64(cache)[table[i, : need[i]]].reshape(-1, dim)
        for t in range(q_len):
            seen = keys[: kv_len - q_len + t + 1]
            s = f64(q[q_start[i] + t]) @ seen.T * SCALE
            p = np.exp(s - s.max(-1, keepdims=True))
            want[q_start[i] + t] = p / p.sum(-1, keepdims=True) @ seen[:, :latent]
    cache = jnp.where(jnp.asarray(owned)[:, :, None], cache, jnp.nan)
    lengths = np.array([k for _, k in rows], np.int32)
    return (q, cache, jnp.asarray(table), jnp.asarray(q_start), jnp.asarray(lengths)), want


def relative(got: Any, want: np.ndarray) -> float:
    got = f64(got)
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 150)), min_size=1, max_size=3),
    st.sampled_from([1, 16, 128]),
    st.integers(0, 99),
)
def test_reference_is_float64s(lengths: list[tuple[int, int]], heads: int, seed: int) -> None:
    rows = [(q, q + k) for q, k in lengths]
    args, want = build(rows, heads, 64, 16, jnp.float32, seed)
    assert relative(mla_attention(*args, scale=SCALE, latent=64), want) < 1e-5


@pytest.mark.parametrize(("rows", "heads", "sms"), [([(1, 400)], 16, 2), ([(2, 70)], 128, 2)])
def test_kernel_is_float64s(rows: list[tuple[int, int]], heads: int, sms: int) -> None:
    args, want = build(rows, heads, 128, 64, jnp.bfloat16, 0)
    mg.reset_interpreter()
    got = mla_attention(
        *args,
        scale=SCALE,
        latent=128,
        backend="mosaic",
        num_sms=sms,
        interpret=mg.interpret_params(True),
    )
    assert relative(got, want) < 3e-3
    assert not mg.races_found()


def test_misfits_are_named() -> None:
    args, _ = build([(1, 5)], 16, 64, 16, jnp.float32, 0)
    with pytest.raises(ValueError, match="do not fit q"):
        mla_attention(args[0][..., :32], *args[1:], scale=1, latent=64)
    with pytest.raises(ValueError, match="operands are float32"):
        mla_attention(*args, scale=1, latent=64, backend="mosaic")
