"""Rotary embedding, fp8 quantisation and the write into the cache in one Hopper kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels._mgpu import pl

LANES = 128  # threads that share a token's row


def row_reason(kv_heads: int, dim: int) -> str:
    """Why a token's keys do not fill the threads of a warpgroup; "" if they do."""
    if kv_heads * dim // 2 % (2 * LANES) or dim % 32:
        return f"{kv_heads} heads of {dim} are no multiple of {4 * LANES} numbers a token"
    return ""


def write_rotated(
    kv_cache: Float[Array, "N 2 G P C"],
    k: Float[Array, "T G C"],
    v: Float[Array, "T G C"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    inverse_scales: Float[Array, "G 2"],
    *,
    interpret: Any = None,
) -> Float[Array, "N 2 G P C"]:
    """One CTA a token; slots outside the cache are dropped. In place when donated."""
    tokens, kv_heads, dim = k.shape
    num_blocks, _, _, page, _ = kv_cache.shape
    half = dim // 2
    row = kv_heads * half
    small = jnp.dtype(kv_cache.dtype).itemsize == 1
    top = mg.largest(kv_cache.dtype)

    def halves(x: Array) -> Array:
        """[2, T, G * half]: a thread then holds both numbers of a pair."""
        return x.reshape(tokens, kv_heads, 2, half).transpose(2, 0, 1, 3).reshape(2, tokens, row)

    def spread(x: Array) -> Array:
        return jnp.tile(x, (1, kv_heads))

    def kv_write(
        k_ref: Any,
        v_ref: Any,
        slot_ref: Any,
        cos_ref: Any,
        sin_ref: Any,
        scale_ref: Any,
        cache: Any,
        smem: Any,
    ) -> None:
        token = lax.axis_index("token")
        slot = slot_ref[token]

        def write(x: jax.Array, scale: jax.Array, which: int, side: int) -> None:
            x = x * scale
            if small:
                x = jnp.minimum(jnp.maximum(x, -top), top)
            smem[which, side] = x.astype(kv_cache.dtype)

        @mg.when((slot >= 0) & (slot < num_blocks * page))
        def _() -> None:
            a, b = k_ref[0, token].astype(jnp.float32), k_ref[1, token].astype(jnp.float32)
            c, s = cos_ref[token], sin_ref[token]
            write(a * c - b * s, scale_ref[0], 0, 0)
            write(b * c + a * s, scale_ref[0], 0, 1)
            for side in range(2):
                write(v_ref[side, token].astype(jnp.float32), scale_ref[1], 1, side)
            mg.commit_smem()
            block = lax.div(slot, jnp.int32(page))
            offset = lax.rem(slot, jnp.int32(page))
            for which in range(2):
                for head in range(kv_heads):
                    for side in range(2):
                        mg.copy_smem_to_gmem(
                            smem.at[which, side, pl.ds(head * half, half)],
                            cache.at[block, which, head, offset, pl.ds(side * half, half)],
                        )
            mg.wait_smem_to_gmem(0)

    target = jax.new_ref(kv_cache)
    scales = jnp.repeat(inverse_scales.T.astype(jnp.float32), half, axis=1)
    mg.kernel(
        kv_write,
        out_type=(),
        scratch_types=[mg.SMEM((2, 2, row), kv_cache.dtype)],
        grid=(tokens,),
        grid_names=("token",),
        **({"interpret": interpret} if interpret is not None else {}),
    )(halves(k), halves(v), slots, spread(cos), spread(sin), scales, target)
    return jax.freeze(target)
