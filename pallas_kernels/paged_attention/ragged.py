"""Attention of a ragged batch in plain XLA, one query tile at a time over chunks of its context:
fallback and oracle of the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels.paged_attention import plan as pn

NEG = -1e30


def attend_tiles(
    q: Float[Array, "T H C"],
    tiles: Int[Array, "nt 8"],
    load: Callable[[Any, Any], tuple[Array, Array]],
    *,
    kv_heads: int,
    chunk: int,
    value_dim: int,
    tile_tokens: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "T H V"]:
    """`tiles` is AttentionPlan.tiles with `tile_tokens` tokens a tile; `load(row, c)` gives keys
    [G, chunk, C] and values [G, chunk, V] of the row's c-th chunk in float32. Slots after a row's
    last key may hold anything. Tokens of no tile give 0."""
    tokens, heads, dim = q.shape
    group = heads // kv_heads
    exact = lax.Precision.HIGHEST
    padded = jnp.pad(q.astype(jnp.float32) * scale, ((0, tile_tokens), (0, 0), (0, 0)))

    def tile(i: Any, out: Array) -> Array:
        row, first, n = tiles[i, pn.ROW], tiles[i, pn.TOKEN], tiles[i, pn.COUNT]
        position, kv_end = tiles[i, pn.POSITION], tiles[i, pn.KV_END]
        query = lax.dynamic_slice_in_dim(padded, first, tile_tokens)
        query = query.reshape(tile_tokens, kv_heads, group, dim)
        of = position + jnp.arange(tile_tokens)

        def step(c: Any, carry: Any) -> Any:
            top, total, acc = carry
            k, v = load(row, c)
            at = c * chunk + jnp.arange(chunk)
            v = jnp.where((at < kv_end)[None, :, None], v, 0)
            s = jnp.einsum("tgqc,gsc->tgqs", query, k, precision=exact)
            if soft_cap:
                s = jnp.tanh(s / soft_cap) * soft_cap
            seen = (at[None] <= of[:, None]) & (at < kv_end)[None]
            if window:
                seen &= at[None] > of[:, None] - window
            s = jnp.where(seen[:, None, None], s, NEG)
            new_top = jnp.maximum(top, s.max(-1))
            p = jnp.where(seen[:, None, None], jnp.exp(s - new_top[..., None]), 0)
            keep = jnp.exp(top - new_top)
            o = jnp.einsum("tgqs,gsc->tgqc", p, v, precision=exact)
            return new_top, total * keep + p.sum(-1), acc * keep[..., None] + o

        shape = (tile_tokens, kv_heads, group)
        if sinks is None:
            top, total = jnp.full(shape, NEG, jnp.float32), jnp.zeros(shape, jnp.float32)
        else:
            top = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, group), shape)
            total = jnp.ones(shape, jnp.float32)
        begin = jnp.maximum(position - window + 1, 0) // chunk if window else 0
        carry = (top, total, jnp.zeros((*shape, value_dim), jnp.float32))
        _, total, acc = lax.fori_loop(begin, -(-kv_end // chunk), step, carry)
        o = (acc / jnp.maximum(total, 1e-30)[..., None]).reshape(tile_tokens, heads, value_dim)
        old = lax.dynamic_slice_in_dim(out, first, tile_tokens)
        live = (jnp.arange(tile_tokens) < n)[:, None, None]
        return lax.dynamic_update_slice_in_dim(out, jnp.where(live, o, old), first, 0)

    used = jnp.sum(tiles[:, pn.UNITS] > 0)
    out = jnp.zeros((tokens + tile_tokens, heads, value_dim), jnp.float32)
    return jax.lax.fori_loop(0, used, tile, out)[:tokens].astype(q.dtype)


def pages_of(block_table: Int[Array, "S W"], row: Any, c: Any, count: int) -> Int[Array, "count"]:
    """Blocks of a row's c-th chunk of `count` blocks; past the table's end its last block."""
    slots = jnp.minimum(c * count + jnp.arange(count), block_table.shape[1] - 1)
    return block_table[row, slots]


def ragged_attention(
    q: Float[Array, "T H C"],
    kv_cache: Float[Array, "N 2 G P C"],
    block_table: Int[Array, "S W"],
    tiles: Int[Array, "nt 8"],
    *,
    block_kv: int = 128,
    kv_scales: Float[Array, "G 2"] | None = None,
    **how: Any,
) -> Float[Array, "T H C"]:
    """`attend_tiles` over the GPU's head-major cache; `how` is its tile_tokens, scale, window,
    soft_cap and sinks. Blocks that a row does not own may hold anything."""
    kv_heads, page, dim = kv_cache.shape[2:]
    count = max(1, block_kv // page)
    chunk = count * page

    def load(row: Any, c: Any) -> tuple[Array, Array]:
        kv = kv_cache[pages_of(block_table, row, c, count)].astype(jnp.float32)
        kv = kv.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, chunk, dim)
        if kv_scales is not None:
            kv = kv * kv_scales.T[:, :, None, None]
        return kv[0], kv[1]

    return attend_tiles(q, tiles, load, kv_heads=kv_heads, chunk=chunk, value_dim=dim, **how)
