"""Grouped matrix product for Hopper: persistent, warp-specialised, with a fused gated activation.

Weights are [E, N, K], so both operands are read along K. An expert's rows start at a multiple of
8; a tile may reach into the next expert's rows, and stores only its own, 64 or by eights. One
warpgroup brings tiles by TMA, each other multiplies 64 rows.
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
from jaxengine.pallas_kernels.moe.routing import ALIGN

EXPERT, FIRST, ROWS, USED = range(4)  # columns of the tile table


def plan_tiles(
    starts: Int[Array, "E"], counts: Int[Array, "E"], rows: int, block_m: int
) -> Int[Array, "tiles 4"]:
    """Tiles of block_m rows, expert by expert: expert, first row / 8 (so that the compiler sees a
    multiple of 8), own rows (a multiple of 8), number of tiles. Experts without rows have none."""
    experts = counts.shape[0]
    size = rows // block_m + experts
    tiles = -(-counts // block_m)
    end = jnp.cumsum(tiles)
    index = jnp.arange(size)
    expert = jnp.minimum(jnp.searchsorted(end, index, side="right"), experts - 1)
    inside = (index - (end[expert] - tiles[expert])) * block_m
    own = jnp.clip(-(-(counts[expert] - inside) // ALIGN) * ALIGN, 0, block_m)
    used = jnp.full((size,), end[-1])
    table = jnp.stack([expert, (starts[expert] + inside) // ALIGN, own, used], axis=1)
    return table.astype(jnp.int32)


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Float[Array, "E N K"],
    tiles: Int[Array, "tiles 4"],
    *,
    config: MoeConfig,
    activation: str = "",
    num_sms: int,
    interpret: Any = None,
) -> Float[Array, "R N2"]:
    """Products of `plan_tiles`'s tiles. Rows of no expert are undefined.

    K is a multiple of config.block_k, the output's width of config.block_n.
    """
    rows, depth = x.shape
    parts = 2 if activation else 1
    width = weights.shape[1] // parts
    block_n, block_k, stages, wgs = (
        config.block_n,
        config.block_k,
        config.stages,
        config.compute_wgs,
    )
    steps = depth // block_k
    columns = width // block_n

    def grouped(x_ref: Any, w_ref: Any, tiles_ref: Any, out_ref: Any, *scratch: Any) -> None:
        x_smem, w_smem, o_smem, full, empty = scratch
        sm = lax.axis_index("sm")
        wg = lax.axis_index("wg")
        total = tiles_ref[0, USED] * columns
        turns = lax.div(jnp.maximum(total - sm, 0) + (num_sms - 1), jnp.int32(num_sms))

        def where(turn: Any) -> tuple[Any, Any]:
            index = sm + turn * num_sms
            # Neighbouring CTAs share an expert's columns in groups, so that its rows stay in L2.
            tile = lax.div(index, jnp.int32(columns))
            return tile, lax.rem(index, jnp.int32(columns)) * block_n

        @mg.when(wg < wgs)
        def _compute() -> None:
            if wgs > 1:
                mg.set_max_registers(232, action="increase")

            @mg.each(0, turns)
            def _(turn: Any) -> None:
                tile, column = where(turn)
                own = jnp.clip(tiles_ref[tile, ROWS] - wg * 64, 0, 64)

                def scope(*accs: Any) -> tuple[jax.Array, ...]:
                    @mg.each(0, steps)
                    def _(step: Any) -> None:
                        at = turn * steps + step
                        slot = lax.rem(at, jnp.int32(stages))
                        mg.barrier_wait(full.at[slot])
                        for part, acc in enumerate(accs):
                            mg.wgmma(acc, x_smem.at[slot, wg], w_smem.at[slot, part].T)
                        # The step before this one is done when only this one is in flight.
                        mg.wgmma_wait(parts)

                        @mg.when(step > 0)
                        def _() -> None:
                            mg.barrier_arrive(empty.at[lax.rem(at - 1, jnp.int32(stages))])

                    mg.wgmma_wait(0)
                    last = turn * steps + (steps - 1)
                    mg.barrier_arrive(empty.at[lax.rem(last, jnp.int32(stages))])
                    return tuple(acc[...] for acc in accs)

                accs = pl.run_scoped(
                    scope, *[mg.ACC((64, block_n), jnp.float32) for _ in range(parts)]
                )
                y = accs[0]
                if activation:
                    y = activate(y, activation) * accs[1]
                mg.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[wg] = y.astype(x.dtype)
                mg.commit_smem()
                first = tiles_ref[tile, FIRST] * ALIGN + wg * 64

                def store(start: int, height: int) -> None:
                    mg.copy_smem_to_gmem(
                        o_smem.at[wg, pl.ds(start, height)],
                        out_ref.at[pl.ds(first + start, height), pl.ds(column, block_n)],
                    )

                @mg.when(own == 64)
                def _() -> None:
                    store(0, 64)

                for start in range(0, 56, ALIGN):

                    @mg.when((own > start) & (own < 64))
                    def _(start: int = start) -> None:
                        store(start, ALIGN)

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

                    for piece in range(wgs):
                        mg.copy_gmem_to_smem(
                            x_ref.at[pl.ds(first + piece * 64, 64), deep],
                            x_smem.at[slot, piece],
                            full.at[slot],
                        )
                    for part in range(parts):
                        mg.copy_gmem_to_smem(
                            w_ref.at[expert, pl.ds(part * width + column, block_n), deep],
                            w_smem.at[slot, part],
                            full.at[slot],
                        )

            total_steps = turns * steps

            @mg.each(jnp.maximum(total_steps - stages, 0), total_steps)
            def _(at: Any) -> None:
                mg.barrier_wait(empty.at[lax.rem(at, jnp.int32(stages))])

    return mg.kernel(
        grouped,
        out_type=jax.ShapeDtypeStruct((rows, width), x.dtype),
        scratch_types=[
            mg.matrix((stages, wgs, 64, block_k), x.dtype),
            mg.matrix((stages, parts, block_n, block_k), weights.dtype),
            mg.matrix((wgs, 64, block_n), x.dtype),
            mg.Barrier(num_arrivals=wgs + parts, num_barriers=stages),
            mg.Barrier(num_arrivals=wgs, num_barriers=stages),
        ],
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=mg.CompilerParams(approx_math=True),
        **({"interpret": interpret} if interpret is not None else {}),
    )(x, weights, tiles)
