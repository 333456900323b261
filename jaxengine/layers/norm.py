"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float
) -> Float[Array, "... D"]:
    """RMSNorm in float32, returned in x's type (Zhang and Sennrich, 2019)."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
