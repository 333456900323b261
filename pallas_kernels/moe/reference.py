"""Grouped matrix products in XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels.moe.routing import ALIGN

ACTIVATIONS = ("silu", "gelu")


def activate(gate: Array, name: str) -> Array:
    """Raises ValueError for an unknown activation."""
    if name == "silu":
        return gate * jax.nn.sigmoid(gate)
    if name == "gelu":
        return jax.nn.gelu(gate, approximate=True)
    raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {name!r}")


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Float[Array, "E N K"],
    counts: Int[Array, "E"],
    *,
    activation: str = "",
) -> Float[Array, "R N2"]:
    """Rows of expert e times its weights' transpose; see the api. Rows of no expert give 0."""
    sizes = -(-counts // ALIGN) * ALIGN
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jax.lax.ragged_dot(
        x,
        weights.transpose(0, 2, 1),
        sizes.astype(jnp.int32),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    if activation:
        gate, up = jnp.split(y, 2, axis=-1)
        y = activate(gate, activation) * up
    return y.astype(x.dtype)
