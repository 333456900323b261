"""Matrix products with weights as Hugging Face stores them, [out, in]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "T in"], weight: Any, bias: Float[Array, "out"] | None = None
) -> Float[Array, "T out"]:
    """x @ weight.T (+ bias), accumulated and returned in float32.

    `weight` is an array [out, in], or a pair (int8 [out, in], scale [out]) for 8-bit products.
    One row is a multiply-and-sum: XLA:CPU converts a bf16 matrix to float32 in memory for a
    one-row dot, which is ten times slower.
    """
    if isinstance(weight, tuple):
        y = _int8_product(x, *weight)
    elif x.shape[0] == 1:
        y = (weight.astype(jnp.float32) * x[0].astype(jnp.float32)).sum(-1)[None]
    else:
        y = jax.lax.dot_general(
            x.astype(weight.dtype),
            weight,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
    return y if bias is None else y + bias.astype(jnp.float32)


def _int8_product(
    x: Float[Array, "T in"], weight: Array, scale: Float[Array, "out"]
) -> Float[Array, "T out"]:
    """Dynamic per-row activation scales, per-channel weight scales (LLM.int8, ZeroQuant)."""
    wide = x.astype(jnp.float32)
    row_scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1, keepdims=True), 1e-8) / 127.0
    quantized = jnp.round(wide / row_scale).astype(jnp.int8)
    if x.shape[0] == 1:
        # One row: integers up to 127 are exact in float32.
        y = (weight.astype(jnp.float32) * quantized[0].astype(jnp.float32)).sum(-1)[None]
    else:
        y = jax.lax.dot_general(
            quantized, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        ).astype(jnp.float32)
    return y * row_scale * scale[None, :]
