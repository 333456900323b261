"""Writing new keys and values into the GPU's head-major cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import device
from jaxengine.pallas_kernels.kv_write import mosaic
from jaxengine.pallas_kernels.kv_write.head_major import write_head_major


def write_kv(
    kv_cache: Float[Array, "N 2 G P C"],
    k: Float[Array, "T G C"],
    v: Float[Array, "T G C"],
    slots: Int[Array, "T"],
    *,
    cos: Float[Array, "T half"] | None = None,
    sin: Float[Array, "T half"] | None = None,
    kv_scales: Float[Array, "G 2"] | None = None,
    backend: str = "auto",
    interpret: Any = None,
) -> Float[Array, "N 2 G P C"]:
    """Write token t's keys and values at slots[t] = block * P + offset (outside: dropped).

    With cos and sin, keys are rotated first (halves paired, whole head width); with kv_scales,
    stored values are divided by them. The kernel serves the fused case; a plain write is an XLA
    scatter, which donation makes in place. Raises ValueError for shapes that do not fit.
    """
    tokens, kv_heads, dim = k.shape
    if kv_cache.shape[1:3] != (2, kv_heads) or kv_cache.shape[4] != dim or v.shape != k.shape:
        raise ValueError(f"kv_cache {kv_cache.shape} does not fit k {k.shape} and v {v.shape}")
    if slots.shape != (tokens,):
        raise ValueError(f"slots must be [{tokens}], got {slots.shape}")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be given together")
    reason = ""
    if cos is None or sin is None:
        reason = "there is nothing to fuse with the write"
    else:
        reason = mosaic.row_reason(kv_heads, dim)
    fused = device.choose("kv_write", backend, reason, simulated=interpret is not None)
    if not fused or cos is None or sin is None:
        return write_head_major(kv_cache, k, v, slots, cos=cos, sin=sin, kv_scales=kv_scales)
    scales = jnp.ones((kv_heads, 2), jnp.float32) if kv_scales is None else 1 / kv_scales
    return mosaic.write_rotated(
        kv_cache,
        k,
        v,
        slots,
        cos.astype(jnp.float32),
        sin.astype(jnp.float32),
        scales,
        interpret=interpret,
    )
