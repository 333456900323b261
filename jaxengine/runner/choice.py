"""Which cache layout and attention code an engine uses, decided once when it is built."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from jaxengine.models.layout import StepLayout
from jaxengine.models.spec import DecoderSpec
from jaxengine.pallas_kernels import device
from jaxengine.pallas_kernels.paged_attention import api

log = logging.getLogger(__name__)

CPU_BLOCK, HOPPER_BLOCK = 16, 64


def choose_attention(
    backend: str, spec: DecoderSpec, kv_dtype: Any, block_size: int | None, on_cpu: bool
) -> tuple[StepLayout, int]:
    """The layout and the block size. "auto" falls back to XLA with one log line that says why.

    Raises ValueError for "mosaic" where the kernels cannot run.
    """
    page = HOPPER_BLOCK if block_size is None else block_size
    reason = device.device_reason() or api.unsupported(
        (1, spec.num_heads, spec.head_dim),
        kv_dtype,
        (1, 2, spec.num_kv_heads, page, spec.head_dim),
        kv_dtype,
    )
    if backend == "mosaic" and reason:
        raise ValueError(f"attention_backend mosaic cannot run: {reason}")
    if backend == "xla" or reason:
        if backend == "auto" and not on_cpu:
            log.warning("attention runs in XLA: %s", reason)
        plain = StepLayout() if on_cpu else replace(StepLayout(), rows_per_turn=0)
        return plain, CPU_BLOCK if block_size is None else block_size
    log.info("attention runs in the Hopper kernels, blocks of %d tokens", page)
    return StepLayout(cache="head_major", attention_backend="mosaic"), page
