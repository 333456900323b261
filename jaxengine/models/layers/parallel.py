"""Products split over the tensor axis of a mesh (inside shard_map); no operation without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.models.layers.linear import linear
from jaxengine.parallel.layout import StepLayout


def reduce(x: Float[Array, "T D"], layout: StepLayout) -> Float[Array, "T D"]:
    """Sum of the devices' partial results. On the GPU they travel as bfloat16: half the bytes."""
    if not layout.tensor_axis:
        return x
    if layout.attention_backend == "mosaic":
        return jax.lax.psum(x.astype(jnp.bfloat16), layout.tensor_axis).astype(x.dtype)
    return jax.lax.psum(x, layout.tensor_axis)


def row_parallel(
    x: Float[Array, "T in"],
    weight: object,
    layout: StepLayout,
    bias: Float[Array, "out"] | None = None,
) -> Float[Array, "T out"]:
    """x @ weight.T summed over devices that each hold a share of the input columns; the bias,
    which all devices hold whole, is added once."""
    if not layout.tensor_axis:
        return linear(x, weight, bias)
    y = reduce(linear(x, weight), layout)
    return y if bias is None else y + bias.astype(jnp.float32)


def first_only(x: Array | None, layout: StepLayout) -> Array | None:
    """x on the first device of the tensor axis, zeros on the others: for what a sum over them
    must count once."""
    if x is None or not layout.tensor_axis:
        return x
    return jnp.where(jax.lax.axis_index(layout.tensor_axis) == 0, x, jnp.zeros_like(x))


def lookup(
    table: Float[Array, "V D"], ids: Int[Array, "T"], layout: StepLayout
) -> Float[Array, "T D"]:
    """Rows of a table whose rows are divided over the tensor axis, as float32."""
    if not layout.tensor_axis:
        return table[ids].astype(jnp.float32)
    rows = table.shape[0]
    local = ids - jax.lax.axis_index(layout.tensor_axis) * rows
    here = (local >= 0) & (local < rows)
    found = table[jnp.where(here, local, 0)].astype(jnp.float32)
    return reduce(jnp.where(here[:, None], found, 0), layout)


def gather_columns(x: Float[Array, "R v"], layout: StepLayout) -> Float[Array, "R V"]:
    """Columns of all devices side by side (logits of a vocabulary divided by rows)."""
    if not layout.tensor_axis:
        return x
    return jax.lax.all_gather(x, layout.tensor_axis, axis=1, tiled=True)
