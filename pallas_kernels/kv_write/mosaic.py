"""Rotary embedding, fp8 quantisation and the write into the cache in one Hopper kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import _mgpu as mg

ROWS = 64  # tokens a CTA


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
    """T is a multiple of 64; slots outside the cache are dropped. In place when donated."""
    tokens, kv_heads, dim = k.shape
    num_blocks, _, _, page, _ = kv_cache.shape
    half = dim // 2
    small = jnp.dtype(kv_cache.dtype).itemsize == 1
    top = float(jnp.finfo(kv_cache.dtype).max)

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
        first = lax.axis_index("tokens") * ROWS
        head = lax.axis_index("head")
        rows = pl.ds(first, ROWS)

        def read(ref: Any) -> jax.Array:
            return mg.load(ref, layout=mg.Layout.WGMMA, optimized=False).astype(jnp.float32)

        def write(x: jax.Array, which: int, start: int) -> None:
            x = x * scale_ref[head, which]
            if small:
                x = jnp.minimum(jnp.maximum(x, -top), top)
            smem[which, :, pl.ds(start, half)] = x.astype(kv_cache.dtype)

        left, right = pl.ds(0, half), pl.ds(half, half)
        c, s = read(cos_ref.at[rows]), read(sin_ref.at[rows])
        a, b = read(k_ref.at[rows, head, left]), read(k_ref.at[rows, head, right])
        write(a * c - b * s, 0, 0)
        write(b * c + a * s, 0, half)
        write(read(v_ref.at[rows, head, left]), 1, 0)
        write(read(v_ref.at[rows, head, right]), 1, half)
        mg.commit_smem()

        @pl.loop(0, ROWS)
        def _(r: Any) -> None:
            slot = slot_ref[first + r]

            @pl.when((slot >= 0) & (slot < num_blocks * page))
            def _() -> None:
                block = lax.div(slot, jnp.int32(page))
                offset = lax.rem(slot, jnp.int32(page))
                for which in range(2):
                    mg.copy_smem_to_gmem(
                        smem.at[which, r], cache.at[block, which, head, offset]
                    )

        mg.wait_smem_to_gmem(0)

    target = jax.new_ref(kv_cache)
    mg.kernel(
        kv_write,
        out_type=(),
        scratch_types=[mg.SMEM((2, ROWS, dim), kv_cache.dtype)],
        grid=(tokens // ROWS, kv_heads),
        grid_names=("tokens", "head"),
        **({"interpret": interpret} if interpret is not None else {}),
    )(k, v, slots, cos, sin, inverse_scales, target)
    return jax.freeze(target)
