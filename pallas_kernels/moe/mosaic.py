"""Grouped matrix product for Hopper: persistent, warp-specialised, with a fused epilogue.

Weights are [E, N, K], so both operands are read along K. An expert's rows start at a multiple of
8; a tile may reach into the next expert's rows, and stores only its own, whole or by eights. One
warpgroup brings tiles by TMA; each other multiplies 64 rows of x by block_n outputs or, with
operands swapped, 64 outputs by the tile's few rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels._mgpu import pl
from jaxengine.pallas_kernels.moe.config import MoeConfig
from jaxengine.pallas_kernels.moe.reference import activate
from jaxengine.pallas_kernels.moe.routing import ALIGN, EXPERT, FIRST, ROWS, USED


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Float[Array, "E N K"],
    tiles: Int[Array, "tiles 4"],
    *,
    config: MoeConfig,
    bias: Float[Array, "E N"] | None = None,
    activation: str = "",
    limit: float = 7.0,
    alpha: float = 1.702,
    num_sms: int,
    interpret: Any = None,
) -> Float[Array, "R N2"]:
    """Products of `plan_tiles`'s tiles of config.block_m rows. Rows of no expert are undefined.

    K is a multiple of config.block_k, the output's width of config.block_n; `bias` is float32.
    """
    rows, depth = x.shape
    parts = 2 if activation else 1
    width = weights.shape[1] // parts
    block_n, block_k, stages = config.block_n, config.block_k, config.stages
    wgs, swap = config.compute_wgs, config.swap
    steps = depth // block_k
    columns = width // block_n
    # A warpgroup's product: its share of one operand times all of the other.
    x_pieces, x_rows = (1, config.block_m) if swap else (wgs, 64)
    w_pieces, w_rows = (wgs, 64) if swap else (1, block_n)
    tile_shape = (64, config.block_m) if swap else (64, block_n)
    out_shape = (x_rows, w_rows)  # rows by outputs of a warpgroup's result

    def grouped(x_ref: Any, w_ref: Any, tiles_ref: Any, *more: Any) -> None:
        bias_ref: Any = None if bias is None else more[0]
        out_ref, x_smem, w_smem, o_smem, full, empty = more[bias is not None :]
        sm = lax.axis_index("sm")
        wg = lax.axis_index("wg")
        total = tiles_ref[0, USED] * columns
        turns = lax.div(jnp.maximum(total - sm, 0) + (num_sms - 1), jnp.int32(num_sms))

        def where(turn: Any) -> tuple[Any, Any]:
            index = sm + turn * num_sms
            # Neighbouring CTAs share an expert's columns in groups, so that its rows stay in L2.
            tile = lax.div(index, jnp.int32(columns))
            return tile, lax.rem(index, jnp.int32(columns)) * block_n

        def products(turn: Any, accs: tuple[Any, ...]) -> tuple[jax.Array, ...]:
            @mg.each(0, steps)
            def _(step: Any) -> None:
                at = turn * steps + step
                slot = lax.rem(at, jnp.int32(stages))
                mg.barrier_wait(full.at[slot])
                for part, acc in enumerate(accs):
                    if swap:
                        mg.wgmma(acc, w_smem.at[slot, part, wg], x_smem.at[slot, 0].T)
                    else:
                        mg.wgmma(acc, x_smem.at[slot, wg], w_smem.at[slot, part, 0].T)
                # The step before this one is done when only this one is in flight.
                mg.wgmma_wait(parts)

                @mg.when(step > 0)
                def _() -> None:
                    mg.barrier_arrive(empty.at[lax.rem(at - 1, jnp.int32(stages))])

            mg.wgmma_wait(0)
            last = turn * steps + (steps - 1)
            mg.barrier_arrive(empty.at[lax.rem(last, jnp.int32(stages))])
            return tuple(acc[...] for acc in accs)

        def bias_of(expert: Any, column: Any) -> jax.Array:
            """The bias of this warpgroup's outputs, over the product's tile."""
            start = column + wg * 64 if swap else column
            layout = mg.ROWS if swap else mg.COLUMNS
            one = mg.load(bias_ref.at[expert, pl.ds(start, w_rows)], layout=layout, optimized=False)
            return lax.broadcast_in_dim(one, tile_shape, [0 if swap else 1])

        def store(own: Any, first: Any, column: Any) -> None:
            """Copy a result's own rows out: all at once, or by eights."""

            def copy(start: int, height: int) -> None:
                mg.copy_smem_to_gmem(
                    o_smem.at[wg, pl.ds(start, height)],
                    out_ref.at[pl.ds(first + start, height), pl.ds(column, w_rows)],
                )

            @mg.when(own == x_rows)
            def _() -> None:
                copy(0, x_rows)

            for start in range(0, x_rows - ALIGN, ALIGN):

                @mg.when((own > start) & (own < x_rows))
                def _(start: int = start) -> None:
                    copy(start, ALIGN)

        @mg.when(wg < wgs)
        def _compute() -> None:
            if wgs > 1:
                mg.set_max_registers(232, action="increase")

            @mg.each(0, turns)
            def _(turn: Any) -> None:
                tile, column = where(turn)
                accs = pl.run_scoped(
                    lambda *accs: products(turn, accs),
                    *[mg.ACC(tile_shape, jnp.float32) for _ in range(parts)],
                )
                expert = tiles_ref[tile, EXPERT]
                y = [
                    acc if bias_ref is None else acc + bias_of(expert, part * width + column)
                    for part, acc in enumerate(accs)
                ]
                result = activate(y[0], y[1], activation, limit, alpha) if activation else y[0]
                mg.wait_smem_to_gmem(0, wait_read_only=True)
                if swap:
                    mg.store_transposed(o_smem.at[wg], result.astype(x.dtype), simulated)
                else:
                    o_smem[wg] = result.astype(x.dtype)
                mg.commit_smem()
                first = tiles_ref[tile, FIRST] * ALIGN
                if swap:
                    store(tiles_ref[tile, ROWS], first, column + wg * 64)
                else:
                    own = jnp.clip(tiles_ref[tile, ROWS] - wg * 64, 0, 64)
                    store(own, first + wg * 64, column)

            mg.wait_smem_to_gmem(0)

        @mg.when(wg == wgs)
        def _load() -> None:
            if wgs > 1:
                mg.set_max_registers(40, action="decrease")

            @mg.each(0, turns)
            def _(turn: Any) -> None:
                tile, column = where(turn)
                expert, first = tiles_ref[tile, EXPERT], tiles_ref[tile, FIRST] * ALIGN

                @mg.each(0, steps)
                def _(step: Any) -> None:
                    at = turn * steps + step
                    slot = lax.rem(at, jnp.int32(stages))
                    deep = pl.ds(step * block_k, block_k)

                    @mg.when(at >= stages)
                    def _() -> None:
                        mg.barrier_wait(empty.at[slot])

                    for piece in range(x_pieces):
                        mg.copy_gmem_to_smem(
                            x_ref.at[pl.ds(first + piece * 64, x_rows), deep],
                            x_smem.at[slot, piece],
                            full.at[slot],
                        )
                    for part in range(parts):
                        for piece in range(w_pieces):
                            start = part * width + column + piece * 64
                            mg.copy_gmem_to_smem(
                                w_ref.at[expert, pl.ds(start, w_rows), deep],
                                w_smem.at[slot, part, piece],
                                full.at[slot],
                            )

            total_steps = turns * steps

            @mg.each(jnp.maximum(total_steps - stages, 0), total_steps)
            def _(at: Any) -> None:
                mg.barrier_wait(empty.at[lax.rem(at, jnp.int32(stages))])

    simulated = interpret is not None
    return mg.kernel(
        grouped,
        out_type=jax.ShapeDtypeStruct((rows, width), x.dtype),
        scratch_types=[
            mg.matrix((stages, x_pieces, x_rows, block_k), x.dtype),
            mg.matrix((stages, parts, w_pieces, w_rows, block_k), weights.dtype),
            mg.matrix((wgs, *out_shape), x.dtype),
            mg.Barrier(num_arrivals=x_pieces + parts * w_pieces, num_barriers=stages),
            mg.Barrier(num_arrivals=wgs, num_barriers=stages),
        ],
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=mg.CompilerParams(approx_math=True),
        **({"interpret": interpret} if simulated else {}),
    )(x, weights, tiles, *(() if bias is None else (bias,)))
