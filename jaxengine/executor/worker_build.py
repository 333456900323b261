"""What `executor.build` gives, when the device lives in a worker process. No JAX in the parent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxengine.config import EngineConfig
from jaxengine.executor.worker import WorkerExecutor
from jaxengine.executor.worker_messages import Description
from jaxengine.models.spec import DecoderSpec
from jaxengine.offload.layout import KVLayout
from jaxengine.sched.batch import BatchShape
from jaxengine.sched.buckets import row_buckets
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.slot_record import SlotShape
from jaxengine.settings.coupling import Member

if TYPE_CHECKING:
    from jaxengine.executor.build import Built


@dataclass(frozen=True)
class WorkerBuilt:
    """As `executor.build.Built`."""

    executor: WorkerExecutor
    sched_sizes: SchedulerSizes
    batch_shape: BatchShape
    slot_shape: SlotShape
    spec: DecoderSpec
    info: dict[str, str]
    kv_layout: KVLayout
    kv_facts: dict[str, str]
    num_shards: int


def build_worker(config: EngineConfig) -> WorkerBuilt:
    """Start a worker that loads the model. Raises as `executor.build.build` and WorkerExecutor."""
    executor = WorkerExecutor(config)
    found = executor.description
    return WorkerBuilt(
        executor,
        found.sched_sizes,
        found.batch_shape,
        found.slot_shape,
        found.spec,
        found.info,
        found.kv_layout,
        found.kv_facts,
        found.num_shards,
    )


def describe(built: Built, member: Member | None) -> Description:
    """In the worker: what its parent must know. The shards are the worker's own."""
    return Description(
        sched_sizes=built.sched_sizes,
        batch_shape=built.batch_shape,
        slot_shape=built.slot_shape,
        spec=built.spec,
        info=built.info,
        kv_layout=built.kv_layout,
        kv_facts=built.kv_facts,
        num_shards=built.num_shards // (1 if member is None else member.size),
        buckets=built.runner.buckets,
        row_sizes=row_sizes_of(built.sched_sizes),
        overlap=built.overlap,
    )


def row_sizes_of(sched_sizes: SchedulerSizes) -> tuple[int, ...]:
    """Rows of the compiled samplers."""
    return row_buckets(sched_sizes.max_num_seqs)
