"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "... D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    plus_one: bool = False,
    axis: str = "",
) -> Float[Array, "... D"]:
    """RMSNorm in float32, returned in x's type (Zhang and Sennrich, 2019).

    `plus_one`: the factor is 1 + weight. `axis`: D is one device's share of the columns, and the
    mean goes over this mesh axis too.
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    if axis:
        mean = jax.lax.pmean(mean, axis)
    factor = weight.astype(jnp.float32)
    if plus_one:
        factor = factor + 1.0
    return (wide * jax.lax.rsqrt(mean + eps) * factor).astype(x.dtype)
