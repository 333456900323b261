"""Rotary position embedding, rotate-half form, with the scalings of published models."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxengine.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[NDArray[np.float32], float]:
    """Frequencies [C/2] in radians a position, and the factor on cos and sin.

    linear: Chen et al. 2023; llama3: the Llama 3.1 release; yarn: Peng et al. 2023; longrope:
    Ding et al. 2024.
    Raises ValueError for an unknown kind.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = 1.0 / rope.theta**exponent
    if rope.kind == "default":
        return base.astype(np.float32), 1.0
    if rope.kind == "linear":
        return (base / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    if rope.kind == "longrope":
        return _longrope(rope, base)
    raise ValueError(
        f"rope kind {rope.kind!r} is not one of default, linear, llama3, yarn, longrope"
    )


def _llama3(rope: RopeSpec, base: NDArray[np.float64]) -> NDArray[np.float64]:
    wavelength = 2 * math.pi / base
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * base / rope.factor + smooth * base
    scaled = np.where(wavelength > low, base / rope.factor, base)
    return np.where((wavelength <= low) & (wavelength >= high), blended, scaled)


def _yarn(
    rope: RopeSpec, base: NDArray[np.float64], head_dim: int
) -> tuple[NDArray[np.float32], float]:
    def dimension_of(rotations: float) -> float:
        return (head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies = base / rope.factor * ramp + base * (1 - ramp)
    return frequencies.astype(np.float32), _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _longrope(rope: RopeSpec, base: NDArray[np.float64]) -> tuple[NDArray[np.float32], float]:
    original = rope.original_max_position
    factors = rope.long_factor if rope.context > original else rope.short_factor
    scale = rope.attention_factor
    if scale is None:
        stretched = rope.factor > 1
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(original)) if stretched else 1.0
    return (base / np.asarray(factors)).astype(np.float32), scale


def rope_tables(
    rope: RopeSpec, head_dim: int, positions: Int[Array, "T"]
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """cos and sin of every position's angles, float32 [T, C/2]."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: Float[Array, "T heads C"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads C"]:
    """Rotate the two halves of every head, or of its first 2 * half numbers."""
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        head = apply_rope(x[..., :rotated], cos, sin)
        return jnp.concatenate([head, x[..., rotated:]], axis=-1)
    first, second = jnp.split(x, 2, axis=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(
        x.dtype
    )
