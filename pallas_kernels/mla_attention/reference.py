"""Latent attention in XLA, one query tile at a time over chunks of its context."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels.paged_attention import plan as pn

NEG = -1e30


def latent_attention(
    q: Float[Array, "T H X"],
    cache: Float[Array, "N P X"],
    block_table: Int[Array, "S W"],
    tiles: Int[Array, "nt 8"],
    *,
    tile_tokens: int,
    latent: int,
    scale: float,
    block_kv: int = 128,
) -> Float[Array, "T H L"]:
    """See the api; `tiles` is AttentionPlan.tiles with `tile_tokens` tokens a tile."""
    tokens, heads, dim = q.shape
    page, width = cache.shape[1], block_table.shape[1]
    count = max(1, block_kv // page)
    chunk = count * page
    exact = lax.Precision.HIGHEST
    padded = jnp.pad(q.astype(jnp.float32) * scale, ((0, tile_tokens), (0, 0), (0, 0)))

    def tile(i: Any, out: Array) -> Array:
        row, first, n = tiles[i, pn.ROW], tiles[i, pn.TOKEN], tiles[i, pn.COUNT]
        position, kv_end = tiles[i, pn.POSITION], tiles[i, pn.KV_END]
        query = lax.dynamic_slice_in_dim(padded, first, tile_tokens)
        of = position + jnp.arange(tile_tokens)

        def step(c: Any, carry: Any) -> Any:
            top, total, acc = carry
            slots = jnp.minimum(c * count + jnp.arange(count), width - 1)
            kv = cache[block_table[row, slots]].astype(jnp.float32).reshape(chunk, dim)
            at = c * chunk + jnp.arange(chunk)
            kv = jnp.where((at < kv_end)[:, None], kv, 0)
            s = jnp.einsum("qhx,sx->qhs", query, kv, precision=exact)
            seen = ((at[None] <= of[:, None]) & (at < kv_end)[None])[:, None]
            s = jnp.where(seen, s, NEG)
            new_top = jnp.maximum(top, s.max(-1))
            p = jnp.where(seen, jnp.exp(s - new_top[..., None]), 0)
            keep = jnp.exp(top - new_top)
            o = jnp.einsum("qhs,sl->qhl", p, kv[:, :latent], precision=exact)
            return new_top, total * keep + p.sum(-1), acc * keep[..., None] + o

        shape = (tile_tokens, heads)
        carry = (
            jnp.full(shape, NEG, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, latent), jnp.float32),
        )
        _, total, acc = lax.fori_loop(0, -(-kv_end // chunk), step, carry)
        o = acc / jnp.maximum(total, 1e-30)[..., None]
        old = lax.dynamic_slice_in_dim(out, first, tile_tokens)
        live = (jnp.arange(tile_tokens) < n)[:, None, None]
        return lax.dynamic_update_slice_in_dim(out, jnp.where(live, o, old), first, 0)

    out = jnp.zeros((tokens + tile_tokens, heads, latent), jnp.float32)
    used = jnp.sum(tiles[:, pn.UNITS] > 0)
    return jax.lax.fori_loop(0, used, tile, out)[:tokens].astype(q.dtype)
