"""Scatter of new tokens' keys and values into the pool (XLA, any device)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels.kv_write.head_major import quantise


def kv_write(
    cache: Float[Array, "N P GC"], new: Float[Array, "T GC"], kv_slot: Int[Array, "T"]
) -> Float[Array, "N P GC"]:
    """Write row t of `new` at flat token index kv_slot[t] = block * P + offset.

    Padding rows carry distinct indices >= N * P, which are dropped; -1 would wrap. With the
    cache donated the scatter is in place. An fp8 cache saturates at its largest value.
    """
    num_blocks, block_size, width = cache.shape
    flat = cache.reshape(num_blocks * block_size, width)
    if new.shape[0] == 1:
        # XLA turns a one-row scatter into a select over the whole cache, which copies it.
        new = jnp.concatenate([new, new])
        kv_slot = jnp.concatenate([kv_slot, kv_slot + num_blocks * block_size])
    if cache.dtype.itemsize == 1:
        new = quantise(new, jnp.float32(1), cache.dtype)
    flat = flat.at[kv_slot].set(new.astype(cache.dtype), mode="drop", unique_indices=True)
    return jnp.reshape(flat, cache.shape)
