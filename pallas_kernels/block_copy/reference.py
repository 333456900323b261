"""Gather and scatter of KV blocks in XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def gather_blocks(cache: Shaped[Array, "N ..."], ids: Int[Array, "n"]) -> Shaped[Array, "n ..."]:
    """Blocks by id; an id outside the cache gives zeros."""
    inside = jnp.where((ids >= 0) & (ids < cache.shape[0]), ids, cache.shape[0])
    return cache.at[inside].get(mode="fill", fill_value=0)


def scatter_blocks(
    cache: Shaped[Array, "N ..."], ids: Int[Array, "n"], blocks: Shaped[Array, "n ..."]
) -> Shaped[Array, "N ..."]:
    """Write blocks by id; an id outside the cache is dropped. In place when donated."""
    inside = jnp.where((ids >= 0) & (ids < cache.shape[0]), ids, cache.shape[0])
    return cache.at[inside].set(blocks.astype(cache.dtype), mode="drop")
