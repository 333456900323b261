"""Paged attention in plain XLA: the CPU product path, and the oracle of the GPU kernels.

Keys and values are token-major, [N blocks, P tokens, G * C], so a block is one contiguous run
and a gather of blocks needs no transpose. Work follows the real lengths: loops run over chunks
of the context with an online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al.,
2022), never over tokens x context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NEG = -1e30  # masked score; finite, so that an all-masked chunk gives weight 0 and not NaN
Carry = tuple[Array, Array, Array]  # running maximum, sum of weights, weighted values
Turn = Callable[[Array, Carry], Carry]
CHUNK = 128  # context tokens of one loop turn: a chunk's K and V stay in cache
BLOCK_DIAGONAL_MAX_HEADS = 4  # kv heads up to which block-diagonal queries beat a transpose


class _Scores(NamedTuple):
    """How scores are treated before the softmax."""

    kv_heads: int
    window: int
    soft_cap: float
    sinks: Float[Array, "H"] | None

    def cap(self, s: Array) -> Array:
        return jnp.tanh(s / self.soft_cap) * self.soft_cap if self.soft_cap else s

    def start(self, shape: tuple[int, ...], heads: tuple[int, ...]) -> tuple[Array, Array]:
        """Running maximum and sum before any key: a sink counts as one weight, exp(0)."""
        if self.sinks is None:
            return jnp.full(shape, NEG, jnp.float32), jnp.zeros(shape, jnp.float32)
        sinks = self.sinks.astype(jnp.float32).reshape(heads)
        return jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32)


def _wide(dtype: Any) -> Any:
    """The type that scores and sums are computed from: fp8 caches hold what bfloat16 does too."""
    return jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype


def _gather(cache: Float[Array, "N P X"], blocks: Int[Array, "R n"]) -> Float[Array, "R t X"]:
    """Blocks' tokens in order, fp8 widened. A flat 2-D gather: 3-D slices are far slower on CPU."""
    num_blocks, block_size, width = cache.shape
    rows, count = blocks.shape
    flat = cache.reshape(num_blocks, block_size * width)
    taken = flat.at[blocks.reshape(-1)].get(mode="promise_in_bounds")
    return taken.reshape(rows, count * block_size, width).astype(_wide(cache.dtype))


def _chunk_blocks(block_size: int, width: int) -> int:
    return max(1, min(CHUNK // block_size, width))


def decode_attention(
    q: Float[Array, "S H C"],
    k_cache: Float[Array, "N P GC"],
    v_cache: Float[Array, "N P GC"],
    block_table: Int[Array, "S W"],
    seq_len: Int[Array, "S"],
    num_rows: Int[Array, ""],
    *,
    num_kv_heads: int,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Float[Array, "H"] | None = None,
    rows_per_turn: int = 0,
) -> Float[Array, "S H C"]:
    """One query a row, at position seq_len - 1, over that row's context.

    q is already scaled. soft_cap > 0 bounds scores by tanh; sinks are extra logits without a
    value. Rows >= num_rows give 0. `block_table` entries must be in range, also
    the unused ones. `rows_per_turn` > 0 handles rows in turns of so many, so that few decode
    rows in a wide program cost little.
    """
    total = q.shape[0]
    how = _Scores(num_kv_heads, window, soft_cap, sinks)
    step = rows_per_turn if 0 < rows_per_turn < total else total
    if step == total:
        live = jnp.arange(total) < num_rows
        lens = jnp.where(live, seq_len, 0)
        return _decode_rows(q, k_cache, v_cache, block_table, lens, how)

    def turn(i: Array, out: Array) -> Array:
        # The last turn may overlap the one before: a slice past the end would be moved.
        at = jnp.minimum(i * step, total - step)
        live = at + jnp.arange(step) < num_rows
        lens = jnp.where(live, jax.lax.dynamic_slice_in_dim(seq_len, at, step), 0)
        rows = _decode_rows(
            jax.lax.dynamic_slice_in_dim(q, at, step),
            k_cache,
            v_cache,
            jax.lax.dynamic_slice_in_dim(block_table, at, step),
            lens,
            how,
        )
        return jax.lax.dynamic_update_slice_in_dim(out, rows, at, 0)

    turns = (num_rows + step - 1) // step
    return jax.lax.fori_loop(0, turns, turn, jnp.zeros(q.shape, jnp.float32))


def _decode_rows(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    lens: Array,
    how: _Scores,
) -> Array:
    rows, heads, dim = q.shape
    kv_heads, window = how.kv_heads, how.window
    block_size = k_cache.shape[1]
    per_chunk = _chunk_blocks(block_size, block_table.shape[1])
    table = _pad_columns(block_table, per_chunk)
    chunk = per_chunk * block_size
    group = heads // kv_heads
    diagonal = kv_heads <= BLOCK_DIAGONAL_MAX_HEADS
    # Which kv head a query head reads: [H, G] one-hot.
    owner = jnp.arange(heads)[:, None] // group == jnp.arange(kv_heads)[None, :]
    q = q.astype(_wide(k_cache.dtype))
    if diagonal:
        spread = jnp.where(owner[None, :, :, None], q[:, :, None, :], 0)
        query = spread.reshape(rows, heads, kv_heads * dim)
    else:
        query = q.reshape(rows, kv_heads, group, dim)

    def scores_of(k: Array) -> Array:
        if diagonal:
            return jnp.einsum("rhx,rtx->rht", query, k, preferred_element_type=jnp.float32)
        k4 = k.reshape(rows, chunk, kv_heads, dim)
        s = jnp.einsum("rgqc,rtgc->rgqt", query, k4, preferred_element_type=jnp.float32)
        return s.reshape(rows, heads, chunk)

    def values_of(p: Array, v: Array) -> Array:
        p = p.astype(v.dtype)
        if diagonal:
            return jnp.einsum("rht,rtx->rhx", p, v, preferred_element_type=jnp.float32)
        p4 = p.reshape(rows, kv_heads, group, chunk)
        v4 = v.reshape(rows, chunk, kv_heads, dim)
        o = jnp.einsum("rgqt,rtgc->rgqc", p4, v4, preferred_element_type=jnp.float32)
        return o.reshape(rows, heads, dim)

    def turn(i: Array, carry: Carry) -> Carry:
        top, total, acc = carry
        blocks = jax.lax.dynamic_slice_in_dim(table, i * per_chunk, per_chunk, axis=1)
        k = _gather(k_cache, blocks)
        v = _gather(v_cache, blocks)
        at = i * chunk + jnp.arange(chunk)[None, :]
        seen = at < lens[:, None]
        if window:
            seen &= at >= lens[:, None] - window
        s = jnp.where(seen[:, None, :], how.cap(scores_of(k)), NEG)
        new_top = jnp.maximum(top, s.max(-1))
        p = jnp.where(seen[:, None, :], jnp.exp(s - new_top[..., None]), 0)
        keep = jnp.exp(top - new_top)
        # Unused slots of a block may hold anything, NaN too: 0 * NaN would spread it.
        v = jnp.where(seen[:, :, None], v, 0)
        return new_top, total * keep + p.sum(-1), acc * keep[..., None] + values_of(p, v)

    last = (lens.max() + chunk - 1) // chunk
    first = (
        jnp.maximum(jnp.where(lens > 0, lens - window, lens.max()).min(), 0) // chunk
        if window
        else 0
    )
    width = kv_heads * dim if diagonal else dim
    top, total = how.start((rows, heads), (heads,))
    start = (top, total, jnp.zeros((rows, heads, width), jnp.float32))
    _, total, acc = jax.lax.fori_loop(first, last, turn, start)
    if diagonal:
        split = acc.reshape(rows, heads, kv_heads, dim)
        acc = jnp.where(owner[None, :, :, None], split, 0).sum(2)
    return acc / jnp.maximum(total, 1e-30)[..., None]


def _pad_columns(table: Int[Array, "R W"], multiple: int) -> Int[Array, "R W2"]:
    """Repeat the last column, so that whole chunks can be sliced."""
    short = -table.shape[1] % multiple
    return jnp.pad(table, ((0, 0), (0, short)), mode="edge") if short else table


def prefill_attention(
    q: Float[Array, "T H C"],
    k_cache: Float[Array, "N P GC"],
    v_cache: Float[Array, "N P GC"],
    block_table: Int[Array, "S W"],
    items: Int[Array, "I four"],
    num_items: Int[Array, ""],
    *,
    num_kv_heads: int,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Float[Array, "H"] | None = None,
    query_block: int = 128,
) -> Float[Array, "T H C"]:
    """Chunks of prompts over their own contexts, by a list of work items.

    Item (row, first, position, count): tokens first .. first + count - 1 of the batch are
    `count` <= query_block consecutive tokens of `row`, the first of them at `position`. Items
    are in ascending order of `first`; each writes a whole block and the next overwrites its
    tail, so one program serves any ragged mix. Tokens of no item give garbage.
    """
    tokens, heads, dim = q.shape
    block_size = k_cache.shape[1]
    group = heads // num_kv_heads
    bq = min(query_block, tokens)
    how = _Scores(num_kv_heads, window, soft_cap, sinks)
    per_chunk = _chunk_blocks(block_size, block_table.shape[1])
    table = _pad_columns(block_table, per_chunk)
    chunk = per_chunk * block_size
    padded = jnp.pad(q.astype(_wide(k_cache.dtype)), ((0, bq), (0, 0), (0, 0)))

    def item(i: Array, out: Array) -> Array:
        row, first, position, count = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
        block = jax.lax.dynamic_slice_in_dim(padded, first, bq)
        query = block.reshape(bq, num_kv_heads, group, dim).transpose(1, 2, 0, 3)
        query = query.reshape(num_kv_heads, group * bq, dim)
        row_table = jax.lax.dynamic_slice_in_dim(table, row, 1)
        at_query = position + jnp.arange(bq)

        def turn(masked: bool) -> Turn:
            def body(c: Array, carry: Carry) -> Carry:
                top, total, acc = carry
                blocks = jax.lax.dynamic_slice_in_dim(row_table, c * per_chunk, per_chunk, axis=1)
                k = _gather(k_cache, blocks)[0].reshape(chunk, num_kv_heads, dim)
                v = _gather(v_cache, blocks)[0].reshape(chunk, num_kv_heads, dim)
                s = jnp.einsum("gqc,tgc->gqt", query, k, preferred_element_type=jnp.float32)
                s = how.cap(s)
                if masked:
                    at = c * chunk + jnp.arange(chunk)
                    seen = at[None, :] <= at_query[:, None]
                    if window:
                        seen &= at[None, :] > at_query[:, None] - window
                    mask = jnp.tile(seen, (group, 1))[None]
                    s = jnp.where(mask, s, NEG)
                    used = at < position + count
                    if window:  # blocks that the window left behind are somebody else's now
                        used &= at > position - window
                    v = jnp.where(used[:, None, None], v, 0)
                new_top = jnp.maximum(top, s.max(-1))
                p = jnp.exp(s - new_top[..., None])
                if masked:
                    p = jnp.where(mask, p, 0)
                keep = jnp.exp(top - new_top)
                o = jnp.einsum(
                    "gqt,tgc->gqc", p.astype(v.dtype), v, preferred_element_type=jnp.float32
                )
                return new_top, total * keep + p.sum(-1), acc * keep[..., None] + o

            return body

        # Scores are [G, (group, query)].
        top, total = how.start((num_kv_heads, group, bq), (num_kv_heads, group, 1))
        carry = (
            top.reshape(num_kv_heads, group * bq),
            total.reshape(num_kv_heads, group * bq),
            jnp.zeros((num_kv_heads, group * bq, dim), jnp.float32),
        )
        last = (position + count + chunk - 1) // chunk
        if window:
            begin = jnp.maximum(position - window + 1, 0) // chunk
            carry = jax.lax.fori_loop(begin, last, turn(True), carry)
        else:
            # Chunks wholly before the first query need no mask.
            whole = (position + 1) // chunk
            carry = jax.lax.fori_loop(0, whole, turn(False), carry)
            carry = jax.lax.fori_loop(whole, last, turn(True), carry)
        _, total, acc = carry
        o = acc / jnp.maximum(total, 1e-30)[..., None]
        o = o.reshape(num_kv_heads, group, bq, dim).transpose(2, 0, 1, 3).reshape(bq, heads, dim)
        return jax.lax.dynamic_update_slice_in_dim(out, o, first, 0)

    out = jnp.zeros((tokens + bq, heads, dim), jnp.float32)
    return jax.lax.fori_loop(0, num_items, item, out)[:tokens]
