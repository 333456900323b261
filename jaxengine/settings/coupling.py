"""Which ranks are coupled, and what each member of such a group is told.

Ranks are coupled when they share experts: `--data-parallel-size N --enable-expert-parallel` on one
server. Their workers form one group of `jax.distributed` that runs one program over all devices, as
attention data parallelism inside one engine does, so they step together and fail together. Every
rank still plans for itself, over its own KV pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxengine.config import EngineConfig

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Member:
    """One rank of a coupled group of `size`."""

    rank: int
    size: int
    port: int


def is_coupled(config: EngineConfig) -> bool:
    """Whether the ranks that a server with these settings starts are coupled. A rank that has a
    server of its own (external, hybrid) shares experts among its own devices only."""
    ranks = config.data_parallel
    alone = ranks.data_parallel_rank is not None or ranks.data_parallel_hybrid_lb
    return ranks.data_parallel_size > 1 and not alone and config.parallel.enable_expert_parallel


def check_coupled(config: EngineConfig) -> None:
    """Raises ValueError that names a setting which does not go with coupled ranks."""
    parallel, cache = config.parallel, config.cache
    clashes = {
        "nnodes": parallel.nnodes > 1,
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "record_expert_load": parallel.record_expert_load is not None,
        "kv_transfer_config": cache.kv_transfer_config is not None,
        "kv_offloading_size": cache.kv_offloading_size is not None,
        "speculative_config": config.scheduler.speculative_config is not None,
    }
    for name, clash in clashes.items():
        if clash:
            raise ValueError(
                f"{name} does not work with ranks that share experts (data_parallel_size above 1 "
                "with enable_expert_parallel); leave one of them out"
            )


def member_config(config: EngineConfig, rank: int, port: int) -> EngineConfig:
    """What the engine process of a coupled rank is told. `data_parallel_size_local` beside a rank
    of the group marks it: servers refuse that."""
    size = config.data_parallel.data_parallel_size
    ranks = replace(config.data_parallel, data_parallel_rank=rank, data_parallel_size_local=size)
    parallel = replace(
        config.parallel,
        attention_data_parallel_size=size * config.parallel.attention_data_parallel_size,
        nnodes=size,
        node_rank=rank,
        master_addr=HOST,
        master_port=port,
    )
    return replace(config, data_parallel=ranks, parallel=parallel)


def moved(config: EngineConfig, port: int) -> EngineConfig:
    """The member's settings for a new group."""
    return replace(config, parallel=replace(config.parallel, master_port=port))


def member_of(config: EngineConfig) -> Member | None:
    """In an engine or its worker: its place in a coupled group. None for any other engine."""
    ranks, parallel = config.data_parallel, config.parallel
    size, rank = ranks.data_parallel_size, ranks.data_parallel_rank
    if size == 1 or rank is None or ranks.data_parallel_size_local != size:
        return None
    if (parallel.nnodes, parallel.node_rank, parallel.master_addr) != (size, rank, HOST):
        return None  # a user's mistake, which `modes.local_ranks` names
    return Member(rank, size, parallel.master_port)
