"""Mixture of experts: routing and products against NumPy, the kernel in GPU interpret mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels import moe


def activated(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """In float64; gpt-oss's limits for clamped_swiglu."""
    if name == "gelu":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return np.asarray(0.5 * gate * (1 + np.tanh(inner)) * up)
    if name == "clamped_swiglu":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1
        return np.asarray(gate / (1 + np.exp(-1.702 * gate)) * up)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def f64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).astype(np.float64)


def mlp64(
    x: Any, gate_up: Any, down: Any, weights: Any, ids: Any, biases: Any = None, name: str = "silu"
) -> np.ndarray:
    x, gate_up, down, weights = f64(x), f64(gate_up), f64(down), f64(weights)
    up_bias, down_bias = map(f64, biases) if biases else (np.zeros(len(down)), np.zeros(len(down)))
    out = np.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(weights[t], np.asarray(ids)[t], strict=True):
            if 0 <= e < len(gate_up):
                gate, up = np.split(gate_up[e] @ x[t] + up_bias[e], 2)
                out[t] += w * (down[e] @ activated(name, gate, up) + down_bias[e])
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


run_mlp = jax.jit(moe.moe_mlp, static_argnames=("activation",))


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from([1, 40]),
    st.sampled_from([2, 9]),
    st.integers(1, 2),
    st.sampled_from(["silu", "gelu", "clamped_swiglu"]),
    st.integers(0, 99),
)
def test_mlp_is_float64s(tokens: int, experts: int, top_k: int, name: str, seed: int) -> None:
    x, *rest = weights_of(seed, tokens, 32, 16, experts, top_k, jnp.float32)
    args = (x * 8, *rest)  # so that the clamp clamps
    rng = np.random.default_rng(seed)
    biases = [jnp.asarray(rng.standard_normal((experts, n)), jnp.float32) for n in (32, 32)]
    got = run_mlp(*args, gate_up_bias=biases[0], down_bias=biases[1], activation=name)
    assert relative(got, mlp64(*args, biases, name)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [300])
def test_narrow_weights_take_wide_inputs(tokens: int) -> None:
    x, gate_up, down, share, ids = weights_of(3, tokens, 64, 32, 4, 2, jnp.bfloat16)
    got = moe.moe_mlp(x.astype(jnp.float32), gate_up, down, share, ids)
    assert got.dtype == jnp.float32
    assert relative(got, mlp64(x, gate_up, down, share, ids)) < 6e-3


def test_reference_does_not_multiply_by_every_expert() -> None:
    x, gate_up, _, _, ids = weights_of(0, 2, 64, 64, 64, 2, jnp.float32)
    d = moe.dispatch(ids, 64)
    table = moe.routing.gather_rows(x, d)
    run = jax.jit(lambda x, w, d: moe.grouped_matmul(x, w, d.starts, d.counts, backend="xla"))
    cost: Any = run.lower(table, gate_up, d).compile().cost_analysis()
    dense = 2 * table.shape[0] * gate_up.size
    assert cost["flops"] < dense / 64  # XLA counts a loop's body once


def test_products_run_inside_shard_map() -> None:
    x, gate_up, down, share, ids = weights_of(0, 9, 32, 16, 4, 2, jnp.float32)
    mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def local(gate_up: Any, down: Any) -> Any:
        first = jax.lax.axis_index("ep") * 4
        return jax.lax.psum(moe.moe_mlp(x, gate_up, down, share, ids - first), "ep")

    run = jax.shard_map(local, mesh=mesh, in_specs=spec("ep"), out_specs=spec())
    assert relative(jax.jit(run)(gate_up, down), mlp64(x, gate_up, down, share, ids)) < 1e-5


def test_experts_elsewhere_add_nothing() -> None:
    x, gate_up, down, share, ids = weights_of(0, 9, 32, 16, 4, 2, jnp.float32)
    whole = mlp64(x, gate_up, down, share, ids)
    halves = [moe.moe_mlp(x, gate_up[a : a + 2], down[a : a + 2], share, ids - a) for a in (0, 2)]
    assert relative(sum(halves), whole) < 1e-5


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 6), min_size=2, max_size=2), min_size=1, max_size=40))
def test_dispatch_is_a_stable_sort(chosen: list[list[int]]) -> None:
    chosen = chosen + [[-1, -1]] * (40 - len(chosen))  # one shape, compiled once
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


KERNELS = {
    "64 rows": (moe.MoeConfig(1, 64, 64, 2), "", False),
    "64 rows gated": (moe.MoeConfig(1, 64, 64, 2), "silu", False),
    "128 rows gated bias": (moe.MoeConfig(2, 64, 64, 2), "clamped_swiglu", True),
    "swapped 8": (moe.MoeConfig(1, 64, 64, 2, True, 8), "silu", False),
    "swapped 16 bias": (moe.MoeConfig(1, 64, 64, 3, True, 16), "clamped_swiglu", True),
    "swapped 32 two": (moe.MoeConfig(2, 128, 64, 2, True, 32), "", True),
}
SLOW_KERNELS = ("64 rows", "swapped 8")


def run_kernel(name: str, grouped: Any = moe.grouped_matmul) -> list[float]:
    """Relative error of each expert's rows; infinite where not finite."""
    config, activation, with_bias = KERNELS[name]
    rng = np.random.default_rng(0)
    # Expert 1 has no rows; expert 2 fills more than a tile; expert 3's last tile overlaps.
    ids = jnp.asarray(np.repeat([0, 2, 3], [3, config.block_m + 9, 20])[:, None], jnp.int32)
    d = moe.dispatch(ids, 5)
    rows, depth, inner = len(d.token), 192, 128 if config.compute_wgs == 2 else 64
    x = jnp.asarray(rng.standard_normal((rows, depth)), jnp.bfloat16)
    x = jnp.where((d.token < len(ids))[:, None], x, jnp.nan)  # rows that nobody owns
    w = jnp.asarray(rng.standard_normal((5, 2 * inner, depth)) / 8, jnp.bfloat16)
    w = w.at[jnp.asarray([1, 4])].set(jnp.nan)  # experts without rows
    bias = jnp.asarray(rng.standard_normal((5, 2 * inner)), jnp.float32) if with_bias else None
    got = grouped(
        x,
        w,
        d.starts,
        d.counts,
        bias=bias,
        activation=activation,
        config=config,
        backend="mosaic",
        num_sms=3,
        interpret=mg.interpret_params(True),
    )
    errors = []
    for e in (0, 2, 3):
        own = slice(int(d.starts[e]), int(d.starts[e] + d.counts[e]))
        y = f64(x[own]) @ f64(w[e]).T + (0 if bias is None else f64(bias[e]))
        if activation:
            y = activated(activation, *np.split(y, 2, axis=-1))
        error = relative(got[own], y)
        errors.append(error if np.isfinite(error) else float("inf"))
    return errors


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW_KERNELS else ()) for n in KERNELS]
)
def test_kernel_is_float64s(name: str) -> None:
    mg.reset_interpreter()
    assert max(run_kernel(name)) < 3e-3
    assert not mg.races_found()


def test_misfits_are_named() -> None:
    x, w = jnp.zeros((64, 32)), jnp.zeros((2, 16, 32))
    n = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="does not fit weights"):
        moe.grouped_matmul(jnp.zeros((64, 31)), w, n, n)
    with pytest.raises(ValueError, match="starts and counts"):
        moe.grouped_matmul(x, w, n[:1], n)
    with pytest.raises(ValueError, match=r"bias must be \[2, 16\]"):
        moe.grouped_matmul(x, w, n, n, bias=jnp.zeros((2, 8)))
    with pytest.raises(ValueError, match="activation must be"):
        moe.grouped_matmul(x, w, n, n, activation="relu")
    with pytest.raises(ValueError, match="operands are float32"):
        moe.grouped_matmul(x, w, n, n, backend="mosaic")
