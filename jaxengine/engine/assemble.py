"""The parts of an engine core, made from its settings. An optional part that is switched off is
there in its do-nothing form (`engine.absent`)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxengine import platform
from jaxengine.config import EngineConfig
from jaxengine.engine.absent import Alone, InProcess, NoDrafts, NoEvents
from jaxengine.engine.grammars import Grammars
from jaxengine.engine.packer import Packer
from jaxengine.engine.state_lock import StateLock
from jaxengine.engine.step_counts import StepCounts
from jaxengine.engine.transfers import Transfers
from jaxengine.executor.facts import Facts
from jaxengine.executor.worker import WorkerExecutor
from jaxengine.metrics.work import WorkModel, work_model
from jaxengine.sched.executor import Executor, Verifier
from jaxengine.settings.coupling import member_of
from jaxengine.speculate.config import SpeculativeConfig, parse_speculative_config
from jaxengine.speculate.driver import Speculator

if TYPE_CHECKING:
    from jaxengine.engine.coupled.lockstep import Lockstep
    from jaxengine.engine.kv_events import KVEventPublisher


@dataclass(frozen=True)
class Parts:
    """Everything around the scheduler that a step passes through."""

    executor: Executor
    facts: Facts
    process: WorkerExecutor | InProcess  # that holds the device
    peers: Lockstep | Alone  # ranks that share experts
    events: KVEventPublisher | NoEvents
    speculation: Speculator | NoDrafts
    packers: list[Packer]  # by shard
    transfers: Transfers
    grammars: Grammars
    counts: StepCounts
    lock: StateLock


def assemble(config: EngineConfig) -> Parts:
    """Load, compile and allocate. Raises ValueError and the loader's errors; nothing stays open
    then."""
    speculation = speculation_of(config)
    with ExitStack() as undo:
        executor, facts = open_executor(config)
        undo.callback(executor.shutdown)
        if speculation is not None:
            sizes = replace(facts.sched_sizes, max_drafts=speculation.num_speculative_tokens)
            facts = replace(facts, sched_sizes=sizes)
        events = event_publisher(config)
        undo.callback(events.close)
        drafts: Speculator | NoDrafts = NoDrafts()
        if speculation is not None:
            drafts = speculator_of(config, executor, facts, speculation)
        transfers = Transfers(config, executor, facts)
        undo.callback(transfers.close)
        peers = _peers(config, executor)
        undo.callback(peers.close)
        parts = Parts(
            executor=executor,
            facts=facts,
            # With fault tolerance the device is another process's, and this one holds no JAX.
            process=executor if isinstance(executor, WorkerExecutor) else InProcess(),
            peers=peers,
            events=events,
            speculation=drafts,
            packers=[
                Packer(
                    facts.batch_shape,
                    facts.slot_shape,
                    config.model.seed + shard,
                    always_seed=speculation is not None,
                )
                for shard in range(facts.num_shards)
            ],
            transfers=transfers,
            grammars=Grammars(config, facts.spec.vocab_size),
            counts=StepCounts(work_model_of(config, facts)),
            lock=StateLock(),
        )
        undo.pop_all()
    return parts


def open_executor(config: EngineConfig) -> tuple[Executor, Facts]:
    """The model's executor: of this process, or, with fault tolerance, of a worker's."""
    if config.fault.enable_fault_tolerance or member_of(config) is not None:
        executor = WorkerExecutor(config)
        return executor, executor.facts
    platform.setup(config.parallel)
    # JAX must not be imported before platform.setup().
    from jaxengine.executor.build import build

    return build(config)


def work_model_of(config: EngineConfig, facts: Facts) -> WorkModel | None:
    """The model behind the estimates of `enable_mfu_metrics`; None without that setting."""
    if not config.server.enable_mfu_metrics:
        return None
    number = 4.0 if config.model.dtype == "float32" else 2.0
    weights = 1.0 if config.model.quantization == "int8" else number
    parallel = config.parallel
    devices = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * facts.num_shards
    return work_model(facts.spec, weights, number).shared_by(devices)


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


def speculator_of(
    config: EngineConfig, executor: Executor, facts: Facts, speculation: SpeculativeConfig
) -> Speculator:
    """Opens the executor's programs for drafts."""
    assert isinstance(executor, Verifier)
    return Speculator(speculation, facts.sched_sizes, executor, config.runner.warmup)


def _peers(config: EngineConfig, executor: Executor) -> Lockstep | Alone:
    member = member_of(config)
    if member is None:
        return Alone(executor)
    # Not above: an engine that steps alone needs no ZMQ.
    from jaxengine.engine.coupled.lockstep import Lockstep

    assert isinstance(executor, WorkerExecutor)
    return Lockstep(member, config, executor)


def event_publisher(config: EngineConfig) -> KVEventPublisher | NoEvents:
    """Raises ValueError for the setting, or when its endpoint cannot be bound."""
    if config.cache.kv_events_config is None:
        return NoEvents()
    # Not above: an engine in a notebook needs no ZMQ.
    from jaxengine.engine.kv_events import KVEventPublisher
    from jaxengine.settings.kv_events import parse_kv_events_config

    events = parse_kv_events_config(config.cache.kv_events_config)
    rank = config.data_parallel.data_parallel_rank or 0
    return KVEventPublisher(events, rank) if events.enable else NoEvents()
