"""Mixture of experts: routing and products against NumPy, the kernel in GPU interpret mode."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels import moe


def mlp64(x: Any, gate_up: Any, down: Any, weights: Any, ids: Any) -> np.ndarray:
    x, gate_up, down, weights = (
        np.asarray(a, np.float32).astype(np.float64) for a in (x, gate_up, down, weights)
    )
    out = np.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(weights[t], np.asarray(ids)[t], strict=True):
            if 0 <= e < len(gate_up):
                gate, up = np.split(gate_up[e] @ x[t], 2)
                out[t] += w * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def relative(got: Any, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want))


def weights_of(
    seed: int, tokens: int, width: int, inner: int, experts: int, top_k: int, dtype: Any
) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)

    def make(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32).astype(dtype)

    x = make(tokens, width)
    share, ids = moe.route(jnp.asarray(rng.standard_normal((tokens, experts))), top_k)
    return x, make(experts, 2 * inner, width), make(experts, width, inner), share, ids


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 40), st.integers(2, 9), st.integers(1, 2), st.integers(0, 99))
def test_mlp_is_float64s(tokens: int, experts: int, top_k: int, seed: int) -> None:
    args = weights_of(seed, tokens, 32, 16, experts, top_k, jnp.float32)
    assert relative(moe.moe_mlp(*args), mlp64(*args)) < 1e-5


def test_experts_elsewhere_add_nothing() -> None:
    x, gate_up, down, share, ids = weights_of(0, 9, 32, 16, 4, 2, jnp.float32)
    whole = mlp64(x, gate_up, down, share, ids)
    halves = [moe.moe_mlp(x, gate_up[a : a + 2], down[a : a + 2], share, ids - a) for a in (0, 2)]
    assert relative(sum(halves), whole) < 1e-5


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 6), min_size=2, max_size=2), min_size=1, max_size=40))
def test_dispatch_is_a_stable_sort(chosen: list[list[int]]) -> None:
    ids = jnp.array(chosen, jnp.int32)
    d = moe.dispatch(ids, 5)
    position, token = np.asarray(d.position), np.asarray(d.token)
    assert (np.asarray(d.starts) % 8 == 0).all()
    for e in range(5):
        copies = [t for t, row in enumerate(chosen) for i in row if i == e]
        start = int(d.starts[e])
        assert int(d.counts[e]) == len(copies)
        assert token[start : start + len(copies)].tolist() == copies
    for t, row in enumerate(chosen):
        for k, e in enumerate(row):
            assert (position[t, k] == len(token)) if not 0 <= e < 5 else token[position[t, k]] == t
    assert (token == len(chosen)).sum() == len(token) - sum(0 <= e < 5 for r in chosen for e in r)


def test_routing_rules() -> None:
    logits = jnp.array([[1.0, 3.0, 2.0, 0.0]])
    share, ids = moe.route(logits, 2)
    assert ids.tolist() == [[1, 2]] and float(share.sum()) == pytest.approx(1)
    share, _ = moe.route(logits, 2, renormalise=False)
    assert float(share[0, 0]) == pytest.approx(float(np.exp(3) / np.exp([1, 3, 2, 0]).sum()))
    _, ids = moe.route(logits, 1, scoring="sigmoid", bias=jnp.array([9.0, 0, 0, 0]))
    assert ids.tolist() == [[0]]
    # Groups {0, 1} and {2, 3}: the first has the larger sum, so expert 2 cannot be chosen.
    _, ids = moe.route(logits, 2, num_groups=2, top_groups=1)
    assert sorted(ids[0].tolist()) == [0, 1]
    share, _ = moe.route(logits, 2, scoring="topk_softmax", scale=2.0)
    assert float(share.sum()) == pytest.approx(2)
    with pytest.raises(ValueError, match="scoring must be"):
        moe.route(logits, 1, scoring="top1")


@pytest.mark.parametrize("wgs", [1, 2])
def test_kernel_is_float64s(wgs: int) -> None:
    rng = np.random.default_rng(wgs)
    # Expert 1 has no rows; expert 2 fills more than a tile; expert 3's last tile overlaps.
    ids = jnp.asarray(np.repeat([0, 2, 3], [3, 64 * wgs + 9, 20])[:, None], jnp.int32)
    d = moe.dispatch(ids, 4)
    rows, depth, inner = len(d.token), 128, 64
    x = jnp.asarray(rng.standard_normal((rows, depth)), jnp.bfloat16)
    x = jnp.where((d.token < len(ids))[:, None], x, jnp.nan)  # rows that nobody owns
    w = jnp.asarray(rng.standard_normal((4, 2 * inner, depth)) / 8, jnp.bfloat16)
    config = moe.MoeConfig(wgs, 64, 64, 2)
    mg.reset_interpreter()
    for activation in ("silu", ""):
        got = moe.grouped_matmul(
            x,
            w,
            d.starts,
            d.counts,
            activation=activation,
            config=config,
            backend="mosaic",
            num_sms=3,
            interpret=mg.interpret_params(True),
        )
        for e in range(4):
            own = slice(int(d.starts[e]), int(d.starts[e] + d.counts[e]))
            a = np.asarray(x[own], np.float32).astype(np.float64)
            y = a @ np.asarray(w[e], np.float32).astype(np.float64).T
            if activation:
                gate, up = np.split(y, 2, axis=-1)
                y = gate / (1 + np.exp(-gate)) * up
            if len(y):
                assert relative(got[own], y) < 3e-3
        assert not mg.races_found()


def test_misfits_are_named() -> None:
    x, w = jnp.zeros((64, 32)), jnp.zeros((2, 16, 32))
    n = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="does not fit weights"):
        moe.grouped_matmul(jnp.zeros((64, 31)), w, n, n)
    with pytest.raises(ValueError, match="starts and counts"):
        moe.grouped_matmul(x, w, n[:1], n)
    with pytest.raises(ValueError, match="activation must be"):
        moe.grouped_matmul(x, w, n, n, activation="relu")
    with pytest.raises(ValueError, match="operands are float32"):
        moe.grouped_matmul(x, w, n, n, backend="mosaic")
