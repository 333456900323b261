"""What an engine must know of the model that its executor holds. No JAX; goes over a worker's
socket as it is."""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.models.spec import DecoderSpec
from jaxengine.offload.layout import KVLayout
from jaxengine.sched.batch import BatchShape
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.shapes import StepShapes
from jaxengine.sched.slot_record import SlotShape


@dataclass(frozen=True)
class Facts:
    """Settled once, when the executor is built."""

    sched_sizes: SchedulerSizes
    batch_shape: BatchShape
    slot_shape: SlotShape
    step_shapes: StepShapes
    spec: DecoderSpec
    kv_layout: KVLayout
    kv_facts: dict[str, str]  # what else, besides the layout, the KV of a token depends on
    num_shards: int  # of attention data parallelism, in this process
    info: dict[str, str]  # for people: model, device, seconds
