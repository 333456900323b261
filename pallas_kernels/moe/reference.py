"""Grouped matrix products in XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels.moe.routing import ALIGN, EXPERT, FIRST, ROWS, USED, plan_tiles

ACTIVATIONS = ("silu", "gelu", "clamped_swiglu")


def activate(gate: Array, up: Array, name: str, limit: float, alpha: float) -> Array:
    """activation(gate) * up; gpt-oss's "clamped_swiglu" bounds both, and adds 1 to up.

    Raises ValueError for an unknown activation.
    """
    if name == "silu":
        return gate * jax.nn.sigmoid(gate) * up
    if name == "gelu":
        return jax.nn.gelu(gate, approximate=True) * up
    if name == "clamped_swiglu":
        gate = jnp.minimum(gate, limit)
        up = jnp.minimum(jnp.maximum(up, -limit), limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
    raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {name!r}")


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Float[Array, "E N K"],
    starts: Int[Array, "E"],
    counts: Int[Array, "E"],
    *,
    bias: Float[Array, "E N"] | None = None,
    activation: str = "",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Float[Array, "R N2"]:
    """See the api. Tiles of an expert's rows times its weights, one after the other: XLA's own
    ragged_dot multiplies every row by every expert. Rows of no expert give 0."""
    rows, experts = x.shape[0], weights.shape[0]
    tall = tile_rows(rows, experts)
    tiles = plan_tiles(starts, counts, rows, tall)
    exact = lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None
    padded = jnp.pad(x.astype(weights.dtype), ((0, tall), (0, 0)))

    def tile(i: Any, out: Array) -> Array:
        expert, first = tiles[i, EXPERT], tiles[i, FIRST] * ALIGN
        part = lax.dynamic_slice_in_dim(padded, first, tall)
        w = lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        y = jnp.einsum("tk,nk->tn", part, w, precision=exact, preferred_element_type=jnp.float32)
        if bias is not None:
            y = y + lax.dynamic_index_in_dim(bias, expert).astype(jnp.float32)
        if activation:
            gate, up = jnp.split(y, 2, axis=-1)
            y = activate(gate, up, activation, limit, alpha)
        # Rows of the next expert are written again by its own tile, which comes later.
        live = jnp.arange(tall) < tiles[i, ROWS]
        y = jnp.where(live[:, None], y, 0).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(out, y, first, 0)

    width = weights.shape[1] // (2 if activation else 1)
    out = _like(jnp.zeros((rows + tall, width), x.dtype), x, weights, tiles)
    return lax.fori_loop(0, tiles[0, USED], tile, out)[:rows]


def tile_rows(rows: int, experts: int) -> int:
    """Rows a tile: few enough that most are an expert's own, many enough to reuse its weights."""
    mean = rows // experts
    return 8 if mean <= 16 else 32 if mean <= 64 else 128


def _like(value: Array, *others: Array) -> Array:
    """`value`, varying over the mesh axes that `others` vary over (inside shard_map)."""
    axes: set[str] = set()
    for other in others:
        manual: Any = getattr(jax.typeof(other), "manual_axis_type", None)
        axes |= set(getattr(manual, "varying", ()))
    return lax.pcast(value, tuple(sorted(axes)), to="varying") if axes else value
