"""Paged attention for Hopper: one persistent, host-planned, split-KV kernel.

A CTA takes its part of the line of work that plan.py made. One warpgroup brings query tiles and
KV blocks by TMA, one copy a page; each compute warpgroup attends 64 query rows with an online
softmax in base 2 (FlashAttention-3, Shah et al., 2024, is the model of the structure). A run that
lies whole in one CTA is written at once; parts of a split run go to scratch, and combine.py joins
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels._mgpu import pl
from jaxengine.pallas_kernels.paged_attention import plan as pn
from jaxengine.pallas_kernels.paged_attention.config import AttentionConfig

NEG = -math.inf


@dataclass(frozen=True)
class Ring:
    """One lane's barriers of a ring of buffers."""

    barriers: Any
    offset: Any

    def at(self, slot: Any) -> Any:
        return self.barriers.at[self.offset + slot]


def attend(
    q: Float[Array, "nt G M C"],
    kv_cache: Float[Array, "N 2 G P C"],
    tiles: Int[Array, "nt 8"],
    ctas: Int[Array, "ctas 8"],
    block_table: Int[Array, "S W"],
    *,
    config: AttentionConfig,
    group: int,
    scale: float = 1.0,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Float[Array, "G M"] | None = None,
    kv_scales: Float[Array, "G 2"] | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "nt G M C"], Float[Array, "parts M C"], Float[Array, "parts 2 M"]]:
    """Attention of packed query tiles; row r of a tile is token r // group, head r % group.

    Returns (out, part_o, part_ml): whole runs are in `out`; parts of split runs, not yet divided
    by their sums, in part_o with (maximum in base 2, sum) in part_ml. The rest is undefined.
    `kv_scales` multiplies an fp8 cache's keys (column 0) and values (column 1).
    """
    num_tiles, kv_heads, rows, dim = q.shape
    page = kv_cache.shape[3]
    block_kv, stages, wgs = config.block_kv, config.stages, config.compute_wgs
    lanes = config.lanes
    fp8 = jnp.dtype(kv_cache.dtype).itemsize == 1
    pages = max(1, block_kv // page)  # TMA copies a block
    piece = min(page, block_kv)  # tokens a copy
    num_ctas = ctas.shape[0]
    simulated = interpret is not None

    def paged_attention(*all_refs: Any) -> None:
        refs = list(all_refs)
        q_ref, kv_ref, tiles_ref, ctas_ref, table_ref = refs[:5]
        del refs[:5]
        sinks_ref = refs.pop(0) if sinks is not None else None
        scales_ref = refs.pop(0) if kv_scales is not None else None
        out_ref, part_o, part_ml = refs[:3]
        thread = lax.axis_index("wg")
        loads = thread >= lanes * wgs
        # Lanes share an SM but nothing else: each has its loader, buffers, barriers and work.
        lane = jnp.where(loads, thread - lanes * wgs, lax.div(thread, jnp.int32(wgs)))
        wg = lax.rem(thread, jnp.int32(wgs))
        cta = lax.axis_index("sm") * lanes + lane
        mine: list[Any] = [None if r is None else r.at[lane] for r in refs[3:13]]
        q_smem, o_smem, k_smem, v_smem, wide_k, wide_v, p_smem, q_full, q_empty, tail_bar = mine
        k_full, v_full, k_empty, v_empty = (Ring(r, lane * stages) for r in refs[13:])
        low, high = ctas_ref[cta, pn.LOW], ctas_ref[cta, pn.HIGH]
        first_run, num_runs = ctas_ref[cta, pn.FIRST_RUN], ctas_ref[cta, pn.NUM_RUNS]

        def item(i: Any) -> tuple[Any, ...]:
            """(tile, head, first block, end block, begins the run, ends it) of the i-th run."""
            run = first_run + i
            tile = lax.div(run, jnp.int32(kv_heads))
            head = lax.rem(run, jnp.int32(kv_heads))
            units = tiles_ref[tile, pn.UNITS]
            start = tiles_ref[tile, pn.START] + head * units
            begin = jnp.maximum(low - start, 0)
            end = jnp.minimum(high - start, units)
            base = tiles_ref[tile, pn.BEGIN_BLOCK]
            first, last = base + jnp.maximum(begin - 1, 0), base + jnp.maximum(end - 1, 0)
            return tile, head, first, last, begin == 0, end == units

        @mg.when(jnp.logical_not(loads))
        def _compute() -> None:
            if lanes * wgs > 1:
                mg.set_max_registers(208 if lanes == 2 else 232, action="increase")
            my_rows = pl.ds(wg * 64, 64)

            def run(i: Any, done: Any) -> Any:
                tile, head, first, last, begins, ends = item(i)
                position = tiles_ref[tile, pn.POSITION]
                kv_end = tiles_ref[tile, pn.KV_END]
                if sinks_ref is None:
                    top = mg.full((64,), NEG, mg.ROWS)
                    total = mg.full((64,), 0.0, mg.ROWS)
                else:
                    sink = mg.load(sinks_ref.at[head, my_rows], layout=mg.ROWS, optimized=False)
                    here = jnp.where(begins, jnp.float32(1), jnp.float32(0))
                    total = mg.full((64,), 1.0, mg.ROWS) * here
                    top = jnp.where(
                        total > 0, sink * jnp.float32(mg.LOG2E), jnp.full((64,), NEG, jnp.float32)
                    )
                acc = mg.full((64, dim), 0.0, mg.Layout.WGMMA)
                factor = jnp.float32(scale * mg.LOG2E)
                if scales_ref is not None:
                    factor = factor * scales_ref[head, 0]
                mg.barrier_wait(q_full)

                def turn(masked: bool) -> Any:
                    def step(block: Any, carry: Any) -> Any:
                        top, total, acc = carry
                        slot = lax.rem(done + block - first, jnp.int32(stages))
                        if masked:  # before the scores take registers
                            value = values(slot)
                            clear_tail(value, block)
                        mg.barrier_wait(k_full.at(slot))
                        if fp8:
                            widen(k_smem.at[slot], wide_k)
                            mg.barrier_arrive(k_empty.at(slot))
                            key = wide_k
                        else:
                            key = k_smem.at[slot]
                        s = mg.matmul(q_smem.at[wg], key.T, (64, block_kv))
                        if not fp8:
                            mg.barrier_arrive(k_empty.at(slot))
                        if soft_cap:
                            capped = jnp.tanh(s * (factor / jnp.float32(soft_cap * mg.LOG2E)))
                            s = capped * jnp.float32(soft_cap * mg.LOG2E)
                        else:
                            s = s * factor
                        if masked:
                            s = jnp.where(seen(block), s, NEG)
                        new_top = jnp.maximum(top, s.max(axis=1))
                        if masked:
                            safe = jnp.where(new_top == NEG, 0.0, new_top)
                        else:
                            safe = new_top
                        keep = jnp.exp2(top - safe)
                        p = jnp.exp2(s - mg.rows_to_tile(safe, (64, block_kv)))
                        total = total * keep + p.sum(axis=1)
                        acc = acc * mg.rows_to_tile(keep, (64, dim))
                        p = p.astype(q.dtype)
                        if not masked:
                            value = values(slot)
                        stage = None if p_smem is None else p_smem.at[wg]
                        acc = mg.accumulate(acc, p, value, stage, simulated)
                        if not fp8:
                            mg.barrier_arrive(v_empty.at(slot))
                        return new_top, total, acc

                    return step

                def values(slot: Any) -> Any:
                    mg.barrier_wait(v_full.at(slot))
                    if not fp8:
                        return v_smem.at[slot]
                    widen(v_smem.at[slot], wide_v)
                    mg.barrier_arrive(v_empty.at(slot))
                    return wide_v

                def seen(block: Any) -> Any:
                    shape = (64, block_kv)
                    layout = mg.Layout.WGMMA
                    row = mg.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
                    at = mg.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
                    at = at + block * block_kv
                    of = position + lax.div(row + wg * 64, jnp.int32(group))
                    mask = (at < kv_end) & (at <= of)
                    if window:
                        mask = mask & (at > of - window)
                    return mask

                def clear(piece: Any, first_token: Any) -> None:
                    layout, width = mg.Layout.WGMMA, 64 if dim % 64 == 0 else dim
                    at = mg.broadcasted_iota(jnp.int32, (64, width), 0, layout=layout)
                    at = at + first_token
                    for column in range(0, dim, width):
                        part = piece.at[:, pl.ds(column, width)]
                        old = mg.load(part, layout=layout, optimized=False)
                        part[...] = jnp.where(at < kv_end, old, jnp.zeros(at.shape, old.dtype))

                def clear_tail(value: Any, block: Any) -> None:
                    """Zero the slots after the last key: they may hold NaN, and 0 * NaN is NaN."""

                    @mg.when((block + 1) * block_kv > kv_end)
                    def _() -> None:
                        for part in range(block_kv // 64):

                            @mg.when(wg == part % wgs)
                            def _(part: int = part) -> None:
                                clear(value.at[pl.ds(part * 64, 64)], block * block_kv + part * 64)

                        mg.commit_smem()
                        if tail_bar is not None:
                            mg.barrier_arrive(tail_bar)
                            mg.barrier_wait(tail_bar)

                carry = (top, total, acc)
                whole = jnp.clip(lax.div(position + 1, jnp.int32(block_kv)), first, last)
                start = first
                if window:
                    # Blocks that the window's edge cuts for some row of the tile.
                    newest = position + (wgs * 64 - 1) // group
                    edge = jnp.maximum(newest - window, -1) + block_kv
                    start = jnp.clip(lax.div(edge, jnp.int32(block_kv)), first, whole)
                    carry = lax.fori_loop(first, start, turn(True), carry)
                carry = lax.fori_loop(start, whole, turn(False), carry)
                top, total, acc = lax.fori_loop(whole, last, turn(True), carry)
                mg.barrier_arrive(q_empty)
                if scales_ref is not None:
                    acc = acc * scales_ref[head, 1]
                complete = begins & ends
                mg.wait_smem_to_gmem(0, wait_read_only=True)

                @mg.when(complete)
                def _() -> None:
                    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
                    o = acc * mg.rows_to_tile(inverse, (64, dim))
                    o_smem[wg] = o.astype(q.dtype)
                    mg.commit_smem()
                    mg.copy_smem_to_gmem(o_smem.at[wg], out_ref.at[tile, head, my_rows])

                @mg.when(jnp.logical_not(complete))
                def _() -> None:
                    slot = 2 * cta + jnp.minimum(i, 1)
                    part_o[slot, my_rows] = acc
                    part_ml[slot, 0, my_rows] = top
                    part_ml[slot, 1, my_rows] = total

                return done + (last - first)

            lax.fori_loop(0, num_runs, run, jnp.int32(0))
            mg.wait_smem_to_gmem(0)

        @mg.when(loads)
        def _load() -> None:
            if lanes * wgs > 1:
                mg.set_max_registers(48 if lanes == 2 else 40, action="decrease")

            def run(i: Any, done: Any) -> Any:
                tile, head, first, last, *_flags = item(i)

                @mg.when(i > 0)
                def _() -> None:
                    mg.barrier_wait(q_empty)

                for w in range(wgs):
                    mg.copy_gmem_to_smem(
                        q_ref.at[tile, head, pl.ds(w * 64, 64)], q_smem.at[w], q_full
                    )
                row = tiles_ref[tile, pn.ROW]
                # Pages past the last key may be anybody's: read the last one's again instead.
                last_page = lax.div(jnp.maximum(tiles_ref[tile, pn.KV_END] - 1, 0), jnp.int32(page))

                def step(block: Any, count: Any) -> Any:
                    slot = lax.rem(count, jnp.int32(stages))
                    for which, smem, full, empty in (
                        (0, k_smem, k_full, k_empty),
                        (1, v_smem, v_full, v_empty),
                    ):

                        @mg.when(count >= stages)
                        def _(empty: Any = empty) -> None:
                            mg.barrier_wait(empty.at(slot))

                        for p in range(pages):
                            at = lax.div(block * block_kv, jnp.int32(page)) + p
                            at = table_ref[row, jnp.minimum(at, last_page)]
                            inside = lax.rem(block * block_kv, jnp.int32(page))
                            mg.copy_gmem_to_smem(
                                kv_ref.at[at, which, head, pl.ds(inside, piece)],
                                smem.at[slot, pl.ds(p * piece, piece)],
                                full.at(slot),
                            )
                    return count + 1

                return lax.fori_loop(first, last, step, done)

            done = lax.fori_loop(0, num_runs, run, jnp.int32(0))

            @mg.when(num_runs > 0)
            def _() -> None:
                mg.barrier_wait(q_empty)

            def drain(i: Any, _: Any) -> None:
                slot = lax.rem(i, jnp.int32(stages))
                mg.barrier_wait(k_empty.at(slot))
                mg.barrier_wait(v_empty.at(slot))

            lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)

    def widen(narrow: Any, to: Any) -> None:
        """fp8 to the query's type, which the tensor cores can multiply with it."""
        # A wide head in parts: its float32 values do not fit beside the accumulator.
        width = 128 if dim % 128 == 0 else dim
        for column in range(0, dim, width):
            part = pl.ds(column, width)
            to.at[:, part][...] = narrow.at[:, part][...].astype(jnp.float32).astype(q.dtype)
        mg.commit_smem()

    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((2 * num_ctas, rows, dim), jnp.float32),
        jax.ShapeDtypeStruct((2 * num_ctas, 2, rows), jnp.float32),
    )
    scratch = [
        mg.matrix((lanes, wgs, 64, dim), q.dtype),
        mg.matrix((lanes, wgs, 64, dim), q.dtype),
        mg.matrix((lanes, stages, block_kv, dim), kv_cache.dtype),
        mg.matrix((lanes, stages, block_kv, dim), kv_cache.dtype),
        mg.matrix((lanes, block_kv, dim), q.dtype) if fp8 else None,
        mg.matrix((lanes, block_kv, dim), q.dtype) if fp8 else None,
        mg.matrix((lanes, wgs, 64, block_kv), q.dtype) if simulated else None,
        mg.Barrier(num_arrivals=wgs, num_barriers=lanes),
        mg.Barrier(num_arrivals=wgs, num_barriers=lanes),
        mg.Barrier(num_arrivals=wgs, num_barriers=lanes) if wgs > 1 else None,
        mg.Barrier(num_arrivals=pages, num_barriers=lanes * stages),
        mg.Barrier(num_arrivals=pages, num_barriers=lanes * stages),
        mg.Barrier(num_arrivals=wgs, num_barriers=lanes * stages),
        mg.Barrier(num_arrivals=wgs, num_barriers=lanes * stages),
    ]
    extra = [x for x in (sinks, kv_scales) if x is not None]
    return mg.kernel(
        paged_attention,
        out_type=shapes,
        scratch_types=scratch,
        grid=(num_ctas // lanes,),
        grid_names=("sm",),
        num_threads=lanes * (wgs + 1),
        thread_name="wg",
        compiler_params=mg.CompilerParams(approx_math=True),
        **({"interpret": interpret} if simulated else {}),
    )(q, kv_cache, tiles, ctas, block_table, *extra)
