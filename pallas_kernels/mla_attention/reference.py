"""Latent attention in XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels.paged_attention.ragged import attend_tiles, pages_of


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
    page, dim = cache.shape[1:]
    count = max(1, block_kv // page)
    chunk = count * page

    def load(row: Any, c: Any) -> tuple[Array, Array]:
        rows = cache[pages_of(block_table, row, c, count)].astype(jnp.float32)
        rows = rows.reshape(1, chunk, dim)
        return rows, rows[:, :, :latent]

    return attend_tiles(
        q,
        tiles,
        load,
        kv_heads=1,
        chunk=chunk,
        value_dim=latent,
        tile_tokens=tile_tokens,
        scale=scale,
    )
