"""The choice of cache layout and attention code, made once when an engine is built."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax

from jaxengine.models.spec import DecoderSpec
from jaxengine.pallas_kernels import device
from jaxengine.pallas_kernels.mla_attention import api as mla
from jaxengine.pallas_kernels.paged_attention import api
from jaxengine.parallel.layout import StepLayout

log = logging.getLogger(__name__)

CPU_BLOCK, HOPPER_BLOCK = 16, 64


def _unsupported(spec: DecoderSpec, dtype: Any, kv_dtype: Any, page: int) -> str:
    """Why the kernels cannot take the model's shapes; "" if they can."""
    if spec.mla is not None:
        query = jax.ShapeDtypeStruct((1, spec.num_heads, spec.mla.width), dtype)
        cache = jax.ShapeDtypeStruct((1, page, spec.mla.width), kv_dtype)
        return mla.unsupported(query, cache, spec.mla.latent)
    query_shape = (1, spec.num_heads, spec.head_dim)
    cache_shape = (1, 2, spec.num_kv_heads, page, spec.head_dim)
    return api.unsupported(query_shape, dtype, cache_shape, kv_dtype)


def choose_attention(
    backend: str,
    spec: DecoderSpec,
    dtype: Any,
    block_size: int | None,
    on_cpu: bool,
    kv_dtype: Any = None,
) -> tuple[StepLayout, int]:
    """The layout and the block size. "auto" falls back to XLA with one log line that says why.

    `dtype` is the activations', `kv_dtype` the cache's where it is another.
    Raises ValueError for "mosaic" where the kernels cannot run.
    """
    page = HOPPER_BLOCK if block_size is None else block_size
    reason = device.device_reason() or _unsupported(spec, dtype, kv_dtype or dtype, page)
    if backend == "mosaic" and reason:
        raise ValueError(f"attention_backend mosaic cannot run: {reason}")
    if backend == "xla" or reason:
        if backend == "auto" and not on_cpu:
            log.warning("attention runs in XLA: %s", reason)
        plain = StepLayout() if on_cpu else replace(StepLayout(), rows_per_turn=0)
        return plain, CPU_BLOCK if block_size is None else block_size
    log.info("attention runs in the Hopper kernels, blocks of %d tokens", page)
    return StepLayout(cache="head_major", attention_backend="mosaic"), page
