"""Gather and scatter of KV blocks: the device side of moves between memory tiers."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxengine.pallas_kernels import device
from jaxengine.pallas_kernels.block_copy import mosaic, reference

COPY_CTAS = 16  # SMs that a move may take from compute


def _use_mosaic(cache: Any, backend: str, interpret: Any) -> bool:
    size = math.prod(cache.shape[1:])
    itemsize = jnp.dtype(cache.dtype).itemsize
    reason = ""
    if size % mosaic.LINE:
        reason = f"a block has {size} elements, no multiple of {mosaic.LINE}"
    elif itemsize > 4:
        reason = f"elements have {itemsize} bytes"
    elif backend == "auto":
        reason = "XLA's gather and scatter are as good unless they contend with compute"
    return device.choose("block_copy", backend, reason, simulated=interpret is not None)


def gather_blocks(
    cache: Shaped[Array, "N ..."],
    ids: Int[Array, "n"],
    *,
    backend: str = "auto",
    num_ctas: int = COPY_CTAS,
    interpret: Any = None,
) -> Shaped[Array, "n ..."]:
    """Blocks by id, as one array to send away; an id outside the cache gives zeros."""
    if not _use_mosaic(cache, backend, interpret):
        return reference.gather_blocks(cache, ids)
    lines = cache.reshape(cache.shape[0], -1, mosaic.LINE)
    out = jnp.zeros((ids.shape[0], *lines.shape[1:]), cache.dtype)
    out = mosaic.copy_blocks(lines, out, ids, gather=True, num_ctas=num_ctas, interpret=interpret)
    return out.reshape(ids.shape[0], *cache.shape[1:])


def scatter_blocks(
    cache: Shaped[Array, "N ..."],
    ids: Int[Array, "n"],
    blocks: Shaped[Array, "n ..."],
    *,
    backend: str = "auto",
    num_ctas: int = COPY_CTAS,
    interpret: Any = None,
) -> Shaped[Array, "N ..."]:
    """Write blocks by id; ids outside the cache are dropped. In place when donated.

    Raises ValueError when `blocks` does not fit the cache.
    """
    if blocks.shape != (ids.shape[0], *cache.shape[1:]):
        raise ValueError(f"blocks {blocks.shape} do not fit ids {ids.shape} of {cache.shape}")
    if not _use_mosaic(cache, backend, interpret):
        return reference.scatter_blocks(cache, ids, blocks)
    lines = cache.reshape(cache.shape[0], -1, mosaic.LINE)
    new = blocks.astype(cache.dtype).reshape(blocks.shape[0], -1, mosaic.LINE)
    lines = mosaic.copy_blocks(
        new, lines, ids, gather=False, num_ctas=num_ctas, interpret=interpret
    )
    return lines.reshape(cache.shape)
