"""Writing into the GPU's head-major cache in XLA: a donated scatter, so no copy of the cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "T G C"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T G C"]:
    """Rotary embedding over the whole head width, halves paired, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, s = cos[:, None].astype(jnp.float32), sin[:, None].astype(jnp.float32)
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def quantise(x: Array, scale: Array, dtype: Any) -> Array:
    """x / scale in the cache's type; fp8 saturates at its largest value."""
    x = x.astype(jnp.float32) / scale
    if jnp.dtype(dtype).itemsize == 1:
        limits: Any = ml_dtypes.finfo
        top = float(limits(dtype).max)
        x = jnp.clip(x, -top, top)
    return x.astype(dtype)


def write_head_major(
    kv_cache: Float[Array, "N 2 G P C"],
    k: Float[Array, "T G C"],
    v: Float[Array, "T G C"],
    slots: Int[Array, "T"],
    *,
    cos: Float[Array, "T half"] | None = None,
    sin: Float[Array, "T half"] | None = None,
    kv_scales: Float[Array, "G 2"] | None = None,
) -> Float[Array, "N 2 G P C"]:
    """Write token t at slot block * P + offset; slots outside the cache are dropped."""
    num_blocks, _, _, page, _ = kv_cache.shape
    if cos is not None and sin is not None:
        k = rotate(k, cos, sin)
    if kv_scales is None and jnp.dtype(kv_cache.dtype).itemsize == 1:
        kv_scales = jnp.ones((k.shape[1], 2), jnp.float32)  # a plain cast would make NaN of 500
    if kv_scales is not None:
        k = quantise(k, kv_scales[:, :1], kv_cache.dtype)
        v = quantise(v, kv_scales[:, 1:], kv_cache.dtype)
    both = jnp.stack([k.astype(kv_cache.dtype), v.astype(kv_cache.dtype)], axis=1)
    # -1 would wrap to the last block: everything outside goes past the end, where it is dropped.
    block = jnp.where((slots >= 0) & (slots < num_blocks * page), slots // page, num_blocks)
    return kv_cache.at[block, :, :, slots % page].set(both, mode="drop")
