"""Processes of `jax.distributed` that each pack for their own shards and read only their rows.

All processes run the same programs over all devices; each fills in its own part of what a step
takes. (In `executor.nodes` one process packs for all.) Only the forward program makes processes
wait for each other: the samplers have no part in common.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxengine.parallel.mesh import Devices
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import Int32

Host = np.ndarray[Any, Any]


class AllShards:
    """The process packs for every shard: what it has is the whole."""

    def batch(self, batch: Batch) -> Batch:
        return batch

    def whole(self, part: Int32) -> Any:
        return part

    def rows(self, array: Any) -> Host:
        return np.asarray(array)


class OwnShards:
    """The process packs for its own shards. Batches and results are theirs alone."""

    def __init__(self, devices: Devices, num_processes: int) -> None:
        assert devices.mesh is not None
        self._sharding = NamedSharding(devices.mesh, devices.data)
        self._processes = num_processes

    def batch(self, batch: Batch) -> Batch:
        """The batch over all shards of which `batch` is this process's part."""
        targets, index = batch.prompt_targets, batch.pool_index
        return replace(
            batch,
            blob=self.whole(batch.blob),
            rows_blob=self.whole(batch.rows_blob),
            seeds=[self.whole(seed) for seed in batch.seeds],
            prompt_targets=None if targets is None else self.whole(targets),
            pool_index=None if index is None else self.whole(index),
        )

    def whole(self, part: Int32) -> Any:
        """The array over all shards of which `part` is this process's."""
        shape = (part.shape[0] * self._processes, *part.shape[1:])
        return jax.make_array_from_process_local_data(self._sharding, part, shape)

    def rows(self, array: Any) -> Host:
        """The rows on this process's devices, in order; each once."""
        parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def equal_pools(sched_sizes: SchedulerSizes) -> SchedulerSizes:
    """The sizes that every process has room for: one program serves them all."""
    mine = np.asarray([sched_sizes.num_blocks, sched_sizes.max_model_len], np.int32)
    blocks, length = multihost_utils.process_allgather(mine).reshape(-1, 2).min(0).tolist()
    return replace(sched_sizes, num_blocks=blocks, max_model_len=length)
