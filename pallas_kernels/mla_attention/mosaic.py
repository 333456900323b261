"""Latent attention for Hopper: all heads of a token share one latent key, whose first part is
also the value, so a block is brought once and used for both products.

64 query rows a tile; the 512 columns of the result do not fit one warpgroup's registers, so two
warpgroups make 256 each and both compute the scores. Work is split and joined as in
paged_attention.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels._mgpu import pl
from jaxengine.pallas_kernels.paged_attention import plan as pn

NEG = -math.inf
BLOCK_KV = 64
WGS = 2


def attend(
    q: Float[Array, "nt V 64 X"],
    cache: Float[Array, "N P X"],
    tiles: Int[Array, "nt 8"],
    ctas: Int[Array, "ctas 8"],
    block_table: Int[Array, "S W"],
    *,
    group: int,
    latent: int,
    scale: float,
    stages: int = 2,
    interpret: Any = None,
) -> tuple[Float[Array, "nt V 64 L"], Float[Array, "parts 64 L"], Float[Array, "parts 2 64"]]:
    """As paged_attention.mosaic.attend; V is the number of groups of `group` heads. Results are
    float32: there is no shared memory left to turn narrower rows into whole sectors."""
    num_tiles, virtual, rows, dim = q.shape
    page = cache.shape[1]
    pages, piece = max(1, BLOCK_KV // page), min(page, BLOCK_KV)
    num_ctas = ctas.shape[0]
    half = latent // WGS
    simulated = interpret is not None

    def mla_attention(*refs: Any) -> None:
        q_ref, cache_ref, tiles_ref, ctas_ref, table_ref, out_ref, part_o, part_ml = refs[:8]
        q_smem, kv_smem, p_smem, q_full, q_empty, full, empty, tail = refs[8:]
        cta = lax.axis_index("cta")
        wg = lax.axis_index("wg")
        low, high = ctas_ref[cta, pn.LOW], ctas_ref[cta, pn.HIGH]
        first_run, num_runs = ctas_ref[cta, pn.FIRST_RUN], ctas_ref[cta, pn.NUM_RUNS]

        def item(i: Any) -> tuple[Any, ...]:
            run = first_run + i
            tile, head = lax.div(run, jnp.int32(virtual)), lax.rem(run, jnp.int32(virtual))
            units = tiles_ref[tile, pn.UNITS]
            start = tiles_ref[tile, pn.START] + head * units
            begin = jnp.maximum(low - start, 0)
            end = jnp.minimum(high - start, units)
            complete = (begin == 0) & (end == units)
            return tile, head, jnp.maximum(begin - 1, 0), jnp.maximum(end - 1, 0), complete

        @mg.when(wg < WGS)
        def _compute() -> None:
            mg.set_max_registers(240, action="increase")
            mine = pl.ds(wg * half, half)

            def run(i: Any, done: Any) -> Any:
                tile, head, first, last, complete = item(i)
                position = tiles_ref[tile, pn.POSITION]
                kv_end = tiles_ref[tile, pn.KV_END]
                mg.barrier_wait(q_full)

                def clear_tail(slot: Any, block: Any) -> None:
                    """Zero my columns of the slots after the last key: 0 * NaN is NaN."""

                    @mg.when((block + 1) * BLOCK_KV > kv_end)
                    def _() -> None:
                        layout = mg.Layout.WGMMA
                        at = mg.broadcasted_iota(jnp.int32, (BLOCK_KV, 64), 0, layout=layout)
                        at = at + block * BLOCK_KV
                        for column in range(0, half, 64):
                            part = kv_smem.at[slot, :, pl.ds(wg * half + column, 64)]
                            old = mg.load(part, layout=layout, optimized=False)
                            part[...] = jnp.where(at < kv_end, old, jnp.zeros(at.shape, old.dtype))
                        mg.commit_smem()
                        mg.barrier_arrive(tail)
                        mg.barrier_wait(tail)

                def turn(masked: bool) -> Any:
                    def step(block: Any, carry: Any) -> Any:
                        top, total, acc = carry
                        slot = lax.rem(done + block - first, jnp.int32(stages))
                        mg.barrier_wait(full.at[slot])
                        if masked:
                            clear_tail(slot, block)
                        s = mg.matmul(q_smem, kv_smem.at[slot].T, (64, BLOCK_KV))
                        s = s * jnp.float32(scale * mg.LOG2E)
                        if masked:
                            layout = mg.Layout.WGMMA
                            row = mg.broadcasted_iota(jnp.int32, s.shape, 0, layout=layout)
                            at = mg.broadcasted_iota(jnp.int32, s.shape, 1, layout=layout)
                            at = at + block * BLOCK_KV
                            of = position + lax.div(row, jnp.int32(group))
                            s = jnp.where((at < kv_end) & (at <= of), s, NEG)
                        new_top = jnp.maximum(top, s.max(axis=1))
                        safe = jnp.where(new_top == NEG, 0.0, new_top) if masked else new_top
                        keep = jnp.exp2(top - safe)
                        p = jnp.exp2(s - mg.rows_to_tile(safe, (64, BLOCK_KV)))
                        total = total * keep + p.sum(axis=1)
                        acc = acc * mg.rows_to_tile(keep, (64, half))
                        stage = None if p_smem is None else p_smem.at[wg]
                        value = kv_smem.at[slot, :, mine]
                        acc = mg.accumulate(acc, p.astype(q.dtype), value, stage, simulated)
                        mg.barrier_arrive(empty.at[slot])
                        return new_top, total, acc

                    return step

                carry = (
                    mg.full((64,), NEG, mg.ROWS),
                    mg.full((64,), 0.0, mg.ROWS),
                    mg.full((64, half), 0.0, mg.Layout.WGMMA),
                )
                whole = jnp.clip(lax.div(position + 1, jnp.int32(BLOCK_KV)), first, last)
                carry = lax.fori_loop(first, whole, turn(False), carry)
                top, total, acc = lax.fori_loop(whole, last, turn(True), carry)
                mg.barrier_arrive(q_empty)

                @mg.when(complete)
                def _() -> None:
                    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
                    out_ref[tile, head, :, mine] = acc * mg.rows_to_tile(inverse, (64, half))

                @mg.when(jnp.logical_not(complete))
                def _() -> None:
                    slot = 2 * cta + jnp.minimum(i, 1)
                    part_o[slot, :, mine] = acc

                    @mg.when(wg == 0)
                    def _() -> None:
                        part_ml[slot, 0] = top
                        part_ml[slot, 1] = total

                return done + (last - first)

            lax.fori_loop(0, num_runs, run, jnp.int32(0))

        @mg.when(wg == WGS)
        def _load() -> None:
            mg.set_max_registers(24, action="decrease")

            def run(i: Any, done: Any) -> Any:
                tile, head, first, last, _whole = item(i)

                @mg.when(i > 0)
                def _() -> None:
                    mg.barrier_wait(q_empty)

                mg.copy_gmem_to_smem(q_ref.at[tile, head], q_smem, q_full)
                row = tiles_ref[tile, pn.ROW]
                last_key = jnp.maximum(tiles_ref[tile, pn.KV_END] - 1, 0)
                last_page = lax.div(last_key, jnp.int32(page))

                def step(block: Any, count: Any) -> Any:
                    slot = lax.rem(count, jnp.int32(stages))

                    @mg.when(count >= stages)
                    def _() -> None:
                        mg.barrier_wait(empty.at[slot])

                    for p in range(pages):
                        at = lax.div(block * BLOCK_KV, jnp.int32(page)) + p
                        at = table_ref[row, jnp.minimum(at, last_page)]
                        inside = lax.rem(block * BLOCK_KV, jnp.int32(page))
                        mg.copy_gmem_to_smem(
                            cache_ref.at[at, pl.ds(inside, piece)],
                            kv_smem.at[slot, pl.ds(p * piece, piece)],
                            full.at[slot],
                        )
                    return count + 1

                return lax.fori_loop(first, last, step, done)

            done = lax.fori_loop(0, num_runs, run, jnp.int32(0))

            @mg.when(num_runs > 0)
            def _() -> None:
                mg.barrier_wait(q_empty)

            @mg.each(jnp.maximum(done - stages, 0), done)
            def _(i: Any) -> None:
                mg.barrier_wait(empty.at[lax.rem(i, jnp.int32(stages))])

    return mg.kernel(
        mla_attention,
        out_type=(
            jax.ShapeDtypeStruct((num_tiles, virtual, rows, latent), jnp.float32),
            jax.ShapeDtypeStruct((2 * num_ctas, rows, latent), jnp.float32),
            jax.ShapeDtypeStruct((2 * num_ctas, 2, rows), jnp.float32),
        ),
        scratch_types=[
            mg.matrix((64, dim), q.dtype),
            mg.matrix((stages, BLOCK_KV, dim), cache.dtype),
            mg.matrix((WGS, 64, BLOCK_KV), q.dtype) if simulated else None,
            mg.Barrier(),
            mg.Barrier(num_arrivals=WGS),
            mg.Barrier(num_arrivals=pages, num_barriers=stages),
            mg.Barrier(num_arrivals=WGS, num_barriers=stages),
            mg.Barrier(num_arrivals=WGS),
        ],
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=WGS + 1,
        thread_name="wg",
        compiler_params=mg.CompilerParams(approx_math=True),
        **({"interpret": interpret} if simulated else {}),
    )(q, cache, tiles, ctas, block_table)
