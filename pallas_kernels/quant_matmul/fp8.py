"""fp8 (e4m3) products for Hopper, both operands narrow: 64 outputs a warpgroup by a block of
tokens.

The tensor cores keep few bits of an fp8 sum, so partial sums of 128 inputs are added up in
float32 registers, as DeepSeek-V3's report proposes. Scales (one an output, one a token) come in
at the end. Parts of the inputs may go to different CTAs and are summed in a fixed order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels._mgpu import pl
from jaxengine.pallas_kernels.quant_matmul.config import BLOCK_K, Fp8Config


def matmul(
    x: Float[Array, "R K"],
    x_scale: Float[Array, "R"],
    weight: Float[Array, "N K"],
    scale: Float[Array, "N"],
    config: Fp8Config,
    *,
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "R N"]:
    """In `dtype`, a 16-bit type. R is a multiple of config.block_t, N of 64 * compute_wgs, K of
    128 * splits."""
    rows, depth = x.shape
    outputs = weight.shape[0]
    block_t, wgs, stages = config.block_t, config.compute_wgs, config.stages
    steps = depth // BLOCK_K // config.splits
    whole = config.splits == 1
    simulated = interpret is not None
    shape = (64, block_t)

    def fp8_matmul(x_ref: Any, xs_ref: Any, w_ref: Any, ws_ref: Any, *rest: Any) -> None:
        out_ref, x_smem, w_smem, o_smem, full, empty = rest
        first = lax.axis_index("tile") * (64 * wgs)
        tokens = pl.ds(lax.axis_index("tokens") * block_t, block_t)
        part = lax.axis_index("split")
        wg = lax.axis_index("wg")

        @mg.when(wg < wgs)
        def _compute() -> None:
            mine = pl.ds(first + wg * 64, 64)

            def step(i: Any, total: jax.Array) -> jax.Array:
                slot = lax.rem(i, jnp.int32(stages))
                mg.barrier_wait(full.at[slot])
                some = mg.matmul(w_smem.at[slot, wg], x_smem.at[slot].T, shape)
                mg.barrier_arrive(empty.at[slot])
                return total + some

            total = lax.fori_loop(0, steps, step, mg.full(shape, 0.0, mg.Layout.WGMMA))
            row = mg.load(ws_ref.at[mine], layout=mg.ROWS, optimized=False)
            column = mg.load(xs_ref.at[tokens], layout=mg.COLUMNS, optimized=False)
            total = total * mg.rows_to_tile(row, shape)
            total = total * lax.broadcast_in_dim(column, shape, [1])
            if whole:
                mg.store_transposed(o_smem.at[wg], total.astype(dtype), simulated)
                mg.commit_smem()
                mg.copy_smem_to_gmem(o_smem.at[wg], out_ref.at[tokens, mine])
                mg.wait_smem_to_gmem(0)
            else:
                out_ref[part, mine, tokens] = total

        @mg.when(wg == wgs)
        def _load() -> None:
            @mg.each(0, steps)
            def _(i: Any) -> None:
                slot = lax.rem(i, jnp.int32(stages))
                deep = pl.ds((part * steps + i) * BLOCK_K, BLOCK_K)

                @mg.when(i >= stages)
                def _() -> None:
                    mg.barrier_wait(empty.at[slot])

                mg.copy_gmem_to_smem(x_ref.at[tokens, deep], x_smem.at[slot], full.at[slot])
                for piece in range(wgs):
                    mg.copy_gmem_to_smem(
                        w_ref.at[pl.ds(first + piece * 64, 64), deep],
                        w_smem.at[slot, piece],
                        full.at[slot],
                    )

            @mg.each(max(steps - stages, 0), steps)
            def _(i: Any) -> None:
                mg.barrier_wait(empty.at[lax.rem(i, jnp.int32(stages))])

    parts = (config.splits, outputs, rows)
    out = mg.kernel(
        fp8_matmul,
        out_type=jax.ShapeDtypeStruct(
            (rows, outputs) if whole else parts, dtype if whole else jnp.float32
        ),
        scratch_types=[
            mg.matrix((stages, block_t, BLOCK_K), x.dtype),
            mg.matrix((stages, wgs, 64, BLOCK_K), weight.dtype),
            mg.matrix((wgs, block_t, 64), dtype) if whole else None,
            mg.Barrier(num_arrivals=1 + wgs, num_barriers=stages),
            mg.Barrier(num_arrivals=wgs, num_barriers=stages),
        ],
        grid=(outputs // (64 * wgs), rows // block_t, config.splits),
        grid_names=("tile", "tokens", "split"),
        num_threads=wgs + 1,
        thread_name="wg",
        **({"interpret": interpret} if simulated else {}),
    )(x, x_scale, weight, scale)
    return out if whole else out.sum(0).T.astype(dtype)
