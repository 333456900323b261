"""Tokens to query tiles and back (XLA). Row r of a tile is token r // group, head r % group."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels.paged_attention import plan as pn


def tile_heads(heads: int, group: int, rows: int) -> Int[Array, "G rows"]:
    """The head of each row of a tile, for each of the heads // group groups."""
    groups = jnp.arange(heads // group)[:, None]
    return groups * group + jnp.arange(rows)[None] % group


def pack(
    q: Float[Array, "T H C"], tiles: Int[Array, "nt 8"], *, group: int, rows: int
) -> Float[Array, "nt G rows C"]:
    """Query tiles of `rows` rows; rows past a tile's last token repeat that token."""
    tokens, heads, _ = q.shape
    last = jnp.maximum(tiles[:, pn.COUNT] - 1, 0)
    token = tiles[:, pn.TOKEN, None] + jnp.minimum(jnp.arange(rows) // group, last[:, None])
    return q[jnp.clip(token, 0, tokens - 1)[:, None, :], tile_heads(heads, group, rows)[None]]


def unpack(
    out: Float[Array, "nt G rows C"], tiles: Int[Array, "nt 8"], *, group: int, tokens: int
) -> Float[Array, "T H C"]:
    """Each token's rows; 0 for tokens of no tile."""
    rows, heads = out.shape[2], out.shape[1] * group
    used = tiles[:, pn.UNITS] > 0
    start = jnp.where(used, tiles[:, pn.TOKEN], tokens)
    index = jnp.arange(tokens)
    tile = jnp.maximum(jnp.searchsorted(start, index, side="right") - 1, 0)
    inside = index - start[tile]
    live = (inside >= 0) & (inside < tiles[tile, pn.COUNT])
    token = jnp.clip(inside, 0, rows // group - 1)[:, None]
    head = jnp.arange(heads)[None]
    result = out[tile[:, None], head // group, token * group + head % group]
    return jnp.where(live[:, None, None], result, 0)
