"""What an engine core is put together from, by its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxengine import platform
from jaxengine.config import EngineConfig
from jaxengine.executor.worker import WorkerExecutor
from jaxengine.executor.worker_build import WorkerBuilt, build_worker
from jaxengine.metrics.work import WorkModel, work_model
from jaxengine.settings.coupling import member_of
from jaxengine.speculate.config import SpeculativeConfig, parse_speculative_config

if TYPE_CHECKING:
    from jaxengine.engine.coupled.lockstep import Lockstep
    from jaxengine.engine.kv_events import KVEventPublisher
    from jaxengine.executor.build import Built


def open_built(config: EngineConfig) -> Built | WorkerBuilt:
    """The model with its executor: in this process, or, with fault tolerance, in a worker's."""
    if config.fault.enable_fault_tolerance or member_of(config) is not None:
        return build_worker(config)
    platform.setup(config.parallel)
    # JAX must not be imported before platform.setup().
    from jaxengine.executor.build import build

    return build(config)


def work_model_of(config: EngineConfig, built: Built | WorkerBuilt) -> WorkModel | None:
    """For the estimates of `enable_mfu_metrics`; None without it."""
    if not config.server.enable_mfu_metrics:
        return None
    number = 4.0 if config.model.dtype == "float32" else 2.0
    weights = 1.0 if config.model.quantization == "int8" else number
    parallel = config.parallel
    devices = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * built.num_shards
    return work_model(built.spec, weights, number).shared_by(devices)


def speculation_of(config: EngineConfig) -> SpeculativeConfig | None:
    """None when no step has drafts. Raises ValueError for settings that cannot work together."""
    if config.scheduler.speculative_config is None:
        return None
    speculation = parse_speculative_config(config.scheduler.speculative_config)
    parallel = config.parallel
    clashes = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "attention_data_parallel_size": parallel.attention_data_parallel_size > 1,
        "nnodes": parallel.nnodes > 1,
    }
    for name, clash in clashes.items():
        if clash:
            raise ValueError(f"speculative_config does not work with {name}; leave one of them out")
    return speculation if speculation.num_speculative_tokens else None


def make_lockstep(config: EngineConfig, executor: object) -> Lockstep | None:
    """None for an engine that steps alone, which needs no ZMQ."""
    member = member_of(config)
    if member is None:
        return None
    from jaxengine.engine.coupled.lockstep import Lockstep

    assert isinstance(executor, WorkerExecutor)
    return Lockstep(member, config, executor)


def event_publisher(config: EngineConfig) -> KVEventPublisher | None:
    """None without KV events."""
    if config.cache.kv_events_config is None:
        return None
    # Not above: an engine in a notebook needs no ZMQ.
    from jaxengine.engine.kv_events import KVEventPublisher
    from jaxengine.settings.kv_events import parse_kv_events_config

    events = parse_kv_events_config(config.cache.kv_events_config)
    rank = config.data_parallel.data_parallel_rank or 0
    return KVEventPublisher(events, rank) if events.enable else None
