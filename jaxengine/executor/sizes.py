"""The sizes of an engine's steps and of its KV pool, from settings, model and free memory."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.config import EngineConfig
from jaxengine.models.cache import cache_bytes_per_token, device_bytes_per_token
from jaxengine.models.spec import DecoderSpec
from jaxengine.parallel.layout import StepLayout
from jaxengine.runner.kv_room import CPU_KV_BYTES, kv_room
from jaxengine.sched.config import GroupSpec, SchedulerSizes

log = logging.getLogger(__name__)


def plan_sizes(
    config: EngineConfig,
    spec: DecoderSpec,
    kv_dtype: Any,
    block_size: int,
    layout: StepLayout,
    drafter_bytes: int = 0,
    weights: int = 0,
) -> SchedulerSizes:
    """Resolve every size the scheduler needs. Raises ValueError naming the setting.

    `drafter_bytes`: a token's KV in the drafter, in addition to the model's; `weights`: bytes that
    a device will hold."""
    sched, cache, stages = config.scheduler, config.cache, config.parallel.pipeline_parallel_size
    max_num_seqs, budget = _step_limits(config, block_size)
    wanted = _wanted_length(config, spec)
    max_model_len = wanted or spec.max_position
    itemsize = jnp.dtype(kv_dtype).itemsize
    # The pool's memory is one device's, but on CPU, where devices share the machine's.
    token_bytes = drafter_bytes + (
        cache_bytes_per_token(spec, itemsize, layout)
        if _on_cpu()
        else device_bytes_per_token(spec, itemsize, layout, stages)
    )
    most = -(-max_model_len // block_size) * max_num_seqs
    num_blocks = _num_blocks(config, token_bytes * block_size, most, weights)
    fits = num_blocks * block_size
    if wanted is not None and wanted > fits:
        need = wanted * token_bytes / 2**30
        raise ValueError(
            f"max_model_len {wanted} needs {need:.2f} GiB of KV, but the pool of {num_blocks} "
            f"blocks holds {fits} tokens; lower max_model_len or raise kv_cache_memory_bytes"
        )
    if max_model_len > fits:
        log.info("max_model_len is %d, all that the KV pool holds", fits)
    return SchedulerSizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=min(max_model_len, fits),
        block_size=block_size,
        num_blocks=num_blocks,
        groups=tuple(GroupSpec(window) for window in spec.groups),
        enable_prefix_caching=cache.enable_prefix_caching,
        prefix_caching_hash_algo=cache.prefix_caching_hash_algo,
        enable_chunked_prefill=sched.enable_chunked_prefill,
        long_prefill_token_threshold=sched.long_prefill_token_threshold,
        policy=sched.scheduling_policy,
        async_scheduling=sched.async_scheduling,
        num_cohorts=stages if sched.async_scheduling else 1,
        watermark=sched.watermark,
        residency_share=_residency_share(config),
    )


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _step_limits(config: EngineConfig, block_size: int) -> tuple[int, int]:
    """Most rows and most tokens of a step."""
    sched = config.scheduler
    max_num_seqs = sched.max_num_seqs or (64 if _on_cpu() else 256)
    budget = sched.max_num_batched_tokens or (1024 if _on_cpu() else 8192)
    if max_num_seqs < 1 or budget < 1:
        raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if budget < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {budget} must be at least max_num_seqs {max_num_seqs}"
        )
    return max_num_seqs, budget


def _wanted_length(config: EngineConfig, spec: DecoderSpec) -> int | None:
    wanted = config.model.max_model_len
    if wanted is not None and wanted < 1:
        raise ValueError(f"max_model_len must be at least 1, got {wanted}")
    if wanted is not None and wanted > spec.max_position:
        raise ValueError(
            f"max_model_len {wanted} is more than the {spec.max_position} positions of the model"
        )
    return wanted


def _num_blocks(config: EngineConfig, block_bytes: int, most: int, weights: int) -> int:
    cache = config.cache
    num_blocks = cache.num_gpu_blocks_override
    if num_blocks is None:
        room = cache.kv_cache_memory_bytes or CPU_KV_BYTES
        if not _on_cpu() and cache.kv_cache_memory_bytes is None:
            stats = jax.local_devices()[0].memory_stats() or {}
            room = kv_room(stats, cache.gpu_memory_utilization, weights)
        num_blocks = min(room // block_bytes, most)
    if num_blocks < 1:
        raise ValueError("kv_cache_memory_bytes does not hold a single block")
    return num_blocks


def _residency_share(config: EngineConfig) -> float:
    share = config.server.kv_cache_metrics_sample
    if not 0 < share <= 1:
        raise ValueError(f"kv_cache_metrics_sample must be above 0 and at most 1, got {share}")
    return share if config.server.kv_cache_metrics else 0.0
