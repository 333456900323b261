"""Weight-only int8 and int4 products for few tokens (decode) on Hopper.

The problem is turned round, out^T = W x^T: 64 outputs are the tensor core's rows and tokens its
columns, so few tokens waste little, and weights are the operand that may come from registers,
where they are widened. Parts of the inputs go to different CTAs and are summed in a fixed order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels._mgpu import pl
from jaxengine.pallas_kernels.quant_matmul.config import BLOCK_K, QuantConfig
from jaxengine.pallas_kernels.quant_matmul.reference import QuantWeight


def matmul(
    x: Float[Array, "R K"], weight: QuantWeight, config: QuantConfig, *, interpret: Any = None
) -> Float[Array, "R N"]:
    """R is a multiple of 8 up to 64, N of 64, K of 128 * splits. Scales are one a output, or one
    a block of 128 inputs."""
    rows, depth = x.shape
    outputs = weight.data.shape[0]
    int4 = weight.kind == "int4"
    stages = config.stages
    steps = depth // BLOCK_K // config.splits
    stored = BLOCK_K // 2 if int4 else BLOCK_K
    grouped = weight.scale.shape[1] > 1
    simulated = interpret is not None

    def quant_matmul(x_ref: Any, w_ref: Any, scale_ref: Any, out_ref: Any, *scratch: Any) -> None:
        x_low, x_high, w_smem, a_smem, full, empty = scratch
        mine = pl.ds(lax.axis_index("tile") * 64, 64)
        part = lax.axis_index("split")
        wg = lax.axis_index("wg")

        @mg.when(wg == 0)
        def _compute() -> None:
            def product(acc: jax.Array, a: jax.Array, b: Any) -> jax.Array:
                return mg.accumulate(acc, a.astype(x.dtype), b, a_smem, simulated)

            def scales(column: Any) -> jax.Array:
                one = mg.load(scale_ref.at[column, mine], layout=mg.ROWS, optimized=False)
                return mg.rows_to_tile(one, (64, rows))

            def step(i: Any, total: jax.Array) -> jax.Array:
                slot = lax.rem(i, jnp.int32(stages))
                mg.barrier_wait(full.at[slot])
                acc = mg.full((64, rows), 0.0, mg.Layout.WGMMA) if grouped else total
                packed = mg.load(w_smem.at[slot], layout=mg.Layout.WGMMA, optimized=False)
                if int4:
                    b = packed.astype(jnp.int32)
                    low, high = ((b & 15) ^ 8) - 8, ((b >> 4) ^ 8) - 8
                    acc = product(acc, low.astype(jnp.float32), x_low.at[slot].T)
                    acc = product(acc, high.astype(jnp.float32), x_high.at[slot].T)
                else:
                    acc = product(acc, packed, x_low.at[slot].T)
                mg.barrier_arrive(empty.at[slot])
                return total + acc * scales(part * steps + i) if grouped else acc

            total = lax.fori_loop(0, steps, step, mg.full((64, rows), 0.0, mg.Layout.WGMMA))
            if not grouped:
                total = total * scales(0)
            out_ref[part, mine] = total

        @mg.when(wg == 1)
        def _load() -> None:
            @mg.each(0, steps)
            def _(i: Any) -> None:
                slot = lax.rem(i, jnp.int32(stages))

                @mg.when(i >= stages)
                def _() -> None:
                    mg.barrier_wait(empty.at[slot])

                at = part * steps + i
                mg.copy_gmem_to_smem(
                    w_ref.at[mine, pl.ds(at * stored, stored)], w_smem.at[slot], full.at[slot]
                )
                for piece, x_smem in enumerate((x_low, x_high) if int4 else (x_low,)):
                    mg.copy_gmem_to_smem(
                        x_ref.at[:, pl.ds(at * BLOCK_K + piece * stored, stored)],
                        x_smem.at[slot],
                        full.at[slot],
                    )

            @mg.each(max(steps - stages, 0), steps)
            def _(i: Any) -> None:
                mg.barrier_wait(empty.at[lax.rem(i, jnp.int32(stages))])

    pieces = BLOCK_K // stored
    parts = mg.kernel(
        quant_matmul,
        out_type=jax.ShapeDtypeStruct((config.splits, outputs, rows), jnp.float32),
        scratch_types=[
            mg.matrix((stages, rows, stored), x.dtype),
            mg.matrix((stages, rows, stored), x.dtype) if int4 else None,
            mg.matrix((stages, 64, stored), weight.data.dtype),
            mg.matrix((64, stored), x.dtype) if simulated else None,
            mg.Barrier(num_arrivals=1 + pieces, num_barriers=stages),
            mg.Barrier(num_barriers=stages),
        ],
        grid=(outputs // 64, config.splits),
        grid_names=("tile", "split"),
        num_threads=2,
        thread_name="wg",
        **({"interpret": interpret} if simulated else {}),
    )(x, weight.data, weight.scale.T)
    return parts.sum(0).T.astype(x.dtype)
