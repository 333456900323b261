"""Scheduler settings. Plain data; `jaxengine.config.SchedulerConfig` and `CacheConfig` fill it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupSpec:
    """One KV group: layers that share a block table. window 0 = full attention (tokens)."""

    window: int = 0


@dataclass(frozen=True)
class SchedulerSizes:
    """Everything the scheduler needs to know. Sizes in tokens unless said."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int  # blocks of the pool that may be owned (no reserved block is counted here)
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"  # or "xxhash"
    hash_seed: str = ""  # same seed, same hashes, in every process
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0 = off
    policy: str = "fcfs"  # or "priority"
    async_scheduling: bool = True
    reserve_full_prompt: bool = True  # first admission needs the whole prompt to fit
    watermark: float = 0.0  # share of blocks kept free at admission
    max_drafts: int = 0
    # Pipeline stages: running requests form so many cohorts, which are planned in turn, so that
    # each stage has a step to work on while the others have theirs.
    num_cohorts: int = 1
    residency_share: float = 0.0  # of blocks whose stay is timed (`sched.residency`); 0 = none
