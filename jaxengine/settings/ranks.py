"""Which data-parallel ranks this server runs: all, one of many (external), some (hybrid)."""

from __future__ import annotations

import os
from dataclasses import replace

from jaxengine.config import DataParallelConfig, EngineConfig


def local_ranks(config: DataParallelConfig) -> range:
    """The ranks whose engines this server starts. Raises ValueError naming the flag at fault.

    Internal balancing (the default): all. External: the one of --data-parallel-rank. Hybrid:
    --data-parallel-size-local of them, from --data-parallel-start-rank on.
    """
    size, rank, local = (
        config.data_parallel_size,
        config.data_parallel_rank,
        config.data_parallel_size_local,
    )
    start = config.data_parallel_start_rank
    if size < 1:
        raise ValueError(f"--data-parallel-size must be at least 1, got {size}")
    if config.data_parallel_hybrid_lb:
        if config.data_parallel_external_lb or rank is not None:
            raise ValueError(
                "--data-parallel-hybrid-lb excludes --data-parallel-external-lb and "
                "--data-parallel-rank"
            )
        count = size - start if local is None else local
        if start < 0 or count < 1 or start + count > size:
            raise ValueError(
                f"--data-parallel-start-rank {start} with --data-parallel-size-local {count} does "
                f"not lie within the {size} ranks of --data-parallel-size"
            )
        return range(start, start + count)
    if start != 0:
        raise ValueError("--data-parallel-start-rank needs --data-parallel-hybrid-lb")
    if rank is not None:
        if not 0 <= rank < size:
            raise ValueError(
                f"--data-parallel-rank {rank} is not one of the {size} ranks of "
                "--data-parallel-size"
            )
        if local not in (None, 1):
            raise ValueError(
                f"--data-parallel-size-local {local} does not go with --data-parallel-rank, "
                "which runs one rank"
            )
        return range(rank, rank + 1)
    if config.data_parallel_external_lb:
        raise ValueError("--data-parallel-external-lb needs --data-parallel-rank")
    if local not in (None, size):
        raise ValueError(
            f"--data-parallel-size-local {local} of {size} ranks needs --data-parallel-hybrid-lb"
        )
    return range(size)


def rank_config(config: EngineConfig, rank: int) -> EngineConfig:
    """What the engine process of `rank` is told: its own number, where there are several. Which
    other ranks run here is the server's business."""
    if config.data_parallel.data_parallel_size == 1:
        return config
    ranks = replace(
        config.data_parallel,
        data_parallel_rank=rank,
        data_parallel_hybrid_lb=False,
        data_parallel_size_local=None,
        data_parallel_start_rank=0,
    )
    return replace(config, data_parallel=ranks)


def rank_environment(
    config: EngineConfig, position: int, visible: str | None, num_gpus: int
) -> dict[str, str]:
    """Environment variables that give the engine at `position` on this node its own GPUs.

    `visible`: CUDA_VISIBLE_DEVICES of the server. Empty without GPUs or with one engine. Raises
    ValueError when the node has too few.
    """
    ranks = local_ranks(config.data_parallel)
    if num_gpus == 0 or len(ranks) == 1:
        return {}
    parallel = config.parallel
    mesh = parallel.tensor_parallel_size * parallel.attention_data_parallel_size
    # Of an engine over several nodes, this node's part.
    each = -(-mesh * parallel.pipeline_parallel_size // parallel.nnodes)
    names = [str(i) for i in range(num_gpus)] if visible is None else visible.split(",")
    if len(ranks) * each > len(names):
        raise ValueError(
            f"{len(ranks)} data-parallel ranks of {each} devices each need {len(ranks) * each} "
            f"GPUs, {len(names)} are visible"
        )
    own = names[position * each : (position + 1) * each]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def count_gpus() -> int:
    """NVIDIA devices of this machine, without asking a driver; 0 when JAX is kept on the CPU."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    try:
        names = os.listdir("/dev")
    except OSError:
        return 0
    return sum(n.startswith("nvidia") and n[6:].isdecimal() for n in names)
