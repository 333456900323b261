"""A process of `jax.distributed` that packs for its own shards and reads only their rows.

All processes run the same programs over all devices; each fills in its own part of what a step
takes. (In `nodes.py` one process packs for all.) Only the forward program makes processes wait for
each other: the samplers have no part in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxengine.executor.around import AroundRunner
from jaxengine.parallel.mesh import Devices
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import Int32, StepResult

if TYPE_CHECKING:
    from jaxengine.offload.host_pool import PagePool
    from jaxengine.offload.layout import KVLayout
    from jaxengine.runner.model_runner import Handle, ModelRunner


class ShardRunner(AroundRunner):
    """A `ModelRunner` for the process's own shards. Batches and results are theirs alone."""

    def __init__(self, runner: ModelRunner, devices: Devices, num_processes: int) -> None:
        assert devices.mesh is not None
        super().__init__(runner)
        self._sharding = NamedSharding(devices.mesh, devices.data)
        self._processes = num_processes

    def submit(self, batch: Batch) -> Handle:
        targets, index = batch.prompt_targets, batch.pool_index
        everywhere = replace(
            batch,
            blob=self._spread(batch.blob),
            rows_blob=self._spread(batch.rows_blob),
            seeds=[self._spread(seed) for seed in batch.seeds],
            prompt_targets=None if targets is None else self._spread(targets),
            pool_index=None if index is None else self._spread(index),
        )
        return self._runner.submit(everywhere)

    def sample(self, handle: Handle, mask: Int32) -> None:
        self._runner.sample(handle, self._spread(mask))

    def result(self, handle: Handle) -> list[StepResult]:
        """One for each shard of this process."""
        assert handle.rows is not None, "the batch was not sampled"
        rows: Any = _own_rows(handle.rows)
        prompt: Any = None if handle.prompt is None else _own_rows(handle.prompt)
        pooled: Any = None if handle.pooled is None else _own_rows(handle.pooled)
        return self._runner.result(replace(handle, rows=rows, prompt=prompt, pooled=pooled))

    def _spread(self, part: Int32) -> Any:
        """The array over all shards of which `part` is this process's."""
        whole = (part.shape[0] * self._processes, *part.shape[1:])
        return jax.make_array_from_process_local_data(self._sharding, part, whole)

    def open_transfers(self, pools: Sequence[PagePool], layout: KVLayout) -> None:
        """Raises ValueError."""
        raise ValueError("KV offload does not work with ranks that share experts")

    def reset(self) -> None:
        """Raises ValueError: the others' programs would wait for this one's for ever."""
        raise ValueError("ranks that share experts are replaced together, not reset")

    def sleep(self, level: int) -> None:
        """Raises ValueError."""
        raise ValueError("ranks that share experts cannot sleep")

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        """They never sleep."""

    def close(self) -> None:
        self._runner.close()


def _own_rows(array: Any) -> np.ndarray[Any, Any]:
    """The rows on this process's devices, in order; each once."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def equal_pools(sched_sizes: SchedulerSizes) -> SchedulerSizes:
    """The sizes that every process has room for: one program serves them all."""
    mine = np.asarray([sched_sizes.num_blocks, sched_sizes.max_model_len], np.int32)
    blocks, length = multihost_utils.process_allgather(mine).reshape(-1, 2).min(0).tolist()
    return replace(sched_sizes, num_blocks=blocks, max_model_len=length)
