"""Products, 8-bit weights and rotary tables against float64."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.quantize import quantize
from jaxengine.models.layers.rope import apply_rope, inverse_frequencies, rope_tables
from jaxengine.models.spec import RopeSpec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_float64s(rows: int, dtype: str, bias: bool) -> None:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 96)), dtype)
    weight = jnp.asarray(rng.normal(size=(70, 96)), dtype)
    b = jnp.asarray(rng.normal(size=70), dtype) if bias else None
    got = linear(x, weight, b)
    assert got.dtype == jnp.float32 and got.shape == (rows, 70)
    want = _wide(x) @ _wide(weight).T + (_wide(b) if bias else 0)
    # Inputs are exact in both; only the sum of 96 products is rounded.
    np.testing.assert_allclose(_wide(got), want, atol=2e-5)


def test_one_row_equals_the_same_row_among_others() -> None:
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.normal(size=(3, 64)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(50, 64)), jnp.float32)
    np.testing.assert_allclose(linear(x[:1], weight), linear(x, weight)[:1], atol=1e-5)


def _wide(x: object) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def test_quantized_weights_are_within_half_a_step() -> None:
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(40, 96)).astype(np.float32) * rng.uniform(1e-3, 10, (40, 1))
    weight[3] = 0
    q, scale = map(np.asarray, quantize(jnp.asarray(weight, jnp.float32)))
    assert q.dtype == np.int8 and np.abs(q.astype(int)).max() == 127
    error = np.abs(q * scale[:, None].astype(np.float64) - weight)
    assert (error <= scale[:, None] * 0.5001).all()
    assert (np.abs(q[np.arange(40) != 3]).max(-1) == 127).all()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_eight_bit_products_are_within_their_bound(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 128)).astype(np.float32)
    weight = rng.normal(size=(64, 128)).astype(np.float32)
    q, scale = quantize(jnp.asarray(weight))
    got = _wide(linear(jnp.asarray(x), (q, scale)))
    want = x.astype(np.float64) @ weight.T.astype(np.float64)
    # Each factor is off by half a step: |x| * step_w / 2 + |w| * step_x / 2 + their product.
    step_x = np.abs(x).max(-1, keepdims=True) / 127
    step_w = np.asarray(scale, np.float64)[None, :]
    bound = np.abs(x).sum(-1, keepdims=True) * step_w / 2
    bound = bound + np.abs(weight).sum(-1)[None, :] * step_x / 2 + 128 * step_x * step_w / 4
    assert (np.abs(got - want) <= bound * 1.001).all()
    relative = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert relative < 0.02


ROPES = {
    "default": RopeSpec(theta=10000.0),
    "theta of 1e6": RopeSpec(theta=1e6),
    "linear": RopeSpec(kind="linear", factor=4.0),
    "llama3": RopeSpec(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192),
    "yarn": RopeSpec(kind="yarn", factor=4.0, original_max_position=2048),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_tables_are_float64s(name: str) -> None:
    rope, dim = ROPES[name], 64
    positions = np.array([0, 1, 7, 100, 2047, 4095, 8191])
    frequencies, factor = inverse_frequencies(rope, dim)
    want = _frequencies(rope, dim)
    np.testing.assert_allclose(frequencies, want, rtol=1e-6)
    if name == "yarn":
        assert factor == pytest.approx(0.1 * math.log(4) + 1)
    else:
        assert factor == 1.0
    cos, sin = rope_tables(rope, dim, jnp.asarray(positions))
    angles = positions[:, None] * want[None, :]
    # float32 angles: relative 2**-24 of the product and of the frequency
    slack = 2.5e-7 * np.maximum(angles, 1) * factor
    assert (np.abs(_wide(cos) - np.cos(angles) * factor) <= slack).all()
    assert (np.abs(_wide(sin) - np.sin(angles) * factor) <= slack).all()


def _frequencies(rope: RopeSpec, dim: int) -> np.ndarray:
    """By the published formulas, one frequency at a time."""
    out = []
    for i in range(dim // 2):
        f = rope.theta ** (-2 * i / dim)
        wavelength = 2 * math.pi / f
        if rope.kind == "linear":
            f /= rope.factor
        if rope.kind == "llama3":
            ratio = rope.original_max_position / wavelength
            share = (ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            share = min(max(share, 0.0), 1.0)
            f = share * f + (1 - share) * f / rope.factor
        if rope.kind == "yarn":
            low, high = (
                dim * math.log(rope.original_max_position / (turns * 2 * math.pi))
                / (2 * math.log(rope.theta))
                for turns in (rope.beta_fast, rope.beta_slow)
            )  # fmt: skip
            low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
            f = f / rope.factor * ramp + f * (1 - ramp)
        out.append(f)
    return np.array(out)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.normal(size=(1, 2, 16)), jnp.float32) for _ in range(2))

    def rotated(x: jnp.ndarray, position: int) -> np.ndarray:
        cos, sin = rope_tables(RopeSpec(), 16, jnp.asarray([position]))
        return _wide(apply_rope(x, cos, sin))

    norm = np.linalg.norm(rotated(q, 50), axis=-1)
    np.testing.assert_allclose(norm, np.linalg.norm(_wide(q), axis=-1), rtol=1e-6)
    near = (rotated(q, 9) * rotated(k, 4)).sum(-1)
    far = (rotated(q, 105) * rotated(k, 100)).sum(-1)
    np.testing.assert_allclose(near, far, atol=2e-5)
    assert not np.allclose(near, (rotated(q, 9) * rotated(k, 5)).sum(-1), atol=1e-3)


def test_an_unknown_rope_is_refused() -> None:
    with pytest.raises(ValueError, match="rope kind 'spiral'"):
        inverse_frequencies(RopeSpec(kind="spiral"), 16)
