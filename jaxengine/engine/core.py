"""The engine core: takes requests, runs the step loop, gives back tokens.

    while there is work:
        if room in the pipeline: plan, pack, submit          (never waits for the device)
        if room is left: plan ahead instead of waiting
        take the oldest step's result; reconcile; output

A step with grammars samples apart from its forward, when the masks are known: at once if the
tokens before it are known, else as soon as the step before it has been reconciled. Either way the
masks are worked out while the forward runs.

A rank that shares experts with others agrees with them on every step
(`engine.coupled.lockstep`); it runs a step without tokens when only they have work.

Depth 1 is the synchronous engine, depth 2 the asynchronous one; there is no second loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxengine.config import EngineConfig
from jaxengine.engine.assemble import (
    event_publisher,
    make_lockstep,
    open_built,
    speculation_of,
    work_model_of,
)
from jaxengine.engine.controls import control
from jaxengine.engine.grammars import Grammars
from jaxengine.engine.outputs import NAN_ERROR, Collected, make_request, refusal
from jaxengine.engine.packer import Packer, pack_step
from jaxengine.engine.step_figures import StepFigures
from jaxengine.engine.transfers import Transfers
from jaxengine.executor.coupling import Interrupted
from jaxengine.executor.profile import Profiler
from jaxengine.executor.worker import WorkerExecutor
from jaxengine.executor.worker_process import WorkerDied
from jaxengine.sched.batch import Bucket
from jaxengine.sched.executor import Batch, Executor, Verifier
from jaxengine.sched.kv_events import AllBlocksCleared
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.scheduler import Scheduler
from jaxengine.sched.sharded import ShardedScheduler
from jaxengine.sched.updates import UpdateBatch
from jaxengine.speculate.config import SpeculativeConfig, parse_speculative_config
from jaxengine.speculate.driver import WAIT, Speculator, draft_masks
from jaxengine.wire.messages import (
    EngineOutput,
    EngineReady,
    EngineRequest,
    EngineStats,
)

if TYPE_CHECKING:
    from jaxengine.engine.coupled.lockstep import Lockstep

log = logging.getLogger(__name__)

_BOOKS_TIMEOUT = 0.1  # seconds


@dataclass
class InFlight:
    """A submitted step. `unsampled`: its masks wait for the step before it."""

    plans: list[StepPlan | None]  # by shard
    batch: Batch
    handle: Any
    unsampled: bool
    num_drafts: tuple[int, int] = (0, 0)  # K asked for, and looked for
    began: float = 0.0  # when its planning began


class EngineCore:
    """One model on one device. One thread calls it; another may call `abort_early`."""

    def __init__(self, config: EngineConfig) -> None:
        """Load, compile and allocate. Raises ValueError and the loader's errors."""
        # Held while the books are read or written; free while the device is waited for.
        self._books = threading.RLock()
        self._books_held = False  # for long, as far as is known
        speculation = speculation_of(config)
        built = open_built(config)
        self.config = config
        self.built = built
        self.executor: Executor = built.executor
        # With fault tolerance the device is another process's, and this one holds no JAX.
        self._worker = built.executor if isinstance(built.executor, WorkerExecutor) else None
        # One step more than there are stages: each has work while the next is planned.
        stages = config.parallel.pipeline_parallel_size
        self.depth = 1 + stages if config.scheduler.async_scheduling else 1
        self._events = event_publisher(config)
        self._speculator: Speculator | None = None
        if speculation is not None:
            sched_sizes = replace(built.sched_sizes, max_drafts=speculation.num_speculative_tokens)
            self.built = built = replace(built, sched_sizes=sched_sizes)
            self._speculator = self._make_speculator(speculation)
        shards = range(built.num_shards)
        self._packers = [
            Packer(
                built.batch_shape,
                built.slot_shape,
                config.model.seed + i,
                always_seed=self._speculator is not None,
            )
            for i in shards
        ]
        self._transfers = Transfers(
            config,
            self.executor,
            built.sched_sizes,
            built.kv_layout,
            built.kv_facts,
            built.num_shards,
        )
        self._plan_afresh()
        self._inflight: deque[InFlight] = deque()
        # With the ranks that share its experts; None for an engine that steps alone.
        self.lockstep: Lockstep | None = make_lockstep(config, built.executor)
        self._grammars = Grammars(config, built.spec.vocab_size)
        self._sleep_level = 0  # 0: wholly awake
        self._asleep: frozenset[str] = frozenset()  # what is not on the device (`controls.PARTS`)
        self._last_done = 0.0  # when the last result came; 0: there was no more to do
        self._profiler, self._figures = Profiler(config), StepFigures(work_model_of(config, built))
        self._outputs: list[EngineOutput] = []  # made outside of steps
        self._collected = Collected()
        self._stats = EngineStats(
            pipeline_depth=self.depth, num_blocks=built.sched_sizes.num_blocks * len(shards)
        )

    def _plan_afresh(self) -> None:
        """Schedulers without requests, over empty pools."""
        record = self._events is not None
        self._shards = [
            Scheduler(
                self.built.sched_sizes, connector=self._transfers.connector(i), record_events=record
            )
            for i in range(self.built.num_shards)
        ]
        self._transfers.bind(self._shards)
        # What is asked of the shards together.
        self.scheduler: Scheduler | ShardedScheduler = (
            self._shards[0] if len(self._shards) == 1 else ShardedScheduler(self._shards)
        )

    def _make_speculator(self, speculation: SpeculativeConfig) -> Speculator:
        assert isinstance(self.executor, Verifier)
        return Speculator(
            speculation, self.built.sched_sizes, self.executor, self.config.runner.warmup
        )

    def use_speculation(self, setting: str | dict[str, Any] | None) -> None:
        """Speculate otherwise from now on (None: not at all), within the K that the engine was
        started for. For benches and tests, between requests. Raises ValueError."""
        if self.has_work():
            raise ValueError("use_speculation is for an engine without requests")
        speculation = None if setting is None else parse_speculative_config(setting)
        most = 0 if speculation is None else speculation.num_speculative_tokens
        if most > self.built.sched_sizes.max_drafts:
            raise ValueError(
                f"speculative_config asks for {most} drafts, but the engine was started for "
                f"{self.built.sched_sizes.max_drafts}"
            )
        self._speculator = None
        if speculation is not None and most:
            self._speculator = self._make_speculator(speculation)

    # -- requests ---------------------------------------------------------------------------

    def add_request(self, wire: EngineRequest) -> None:
        """Queue a request. One that cannot run ends alone, with an error output."""
        with self._books:
            try:
                request = make_request(
                    wire, self.built.sched_sizes.max_model_len, self._packers[0], self._grammars
                )
                self.scheduler.add(request)
                if request.grammar is not None:
                    self._grammars.watch(request)
            except ValueError as error:
                self._outputs.append(refusal(wire.request_id, str(error)))

    def abort_requests(self, request_ids: list[str]) -> None:
        """End these; unknown ids are skipped. No output is made for them."""
        with self._books:
            for request in self.scheduler.abort(request_ids):
                self._collected.drop(request.request_id)

    def abort_early(self, request_ids: list[str], report: Callable[[EngineStats], None]) -> None:
        """`abort_requests` from another thread, while a step runs: their slots and blocks are free
        for the next plan. Steps in flight may still write there, but before whoever comes next
        (the device works in order). `report` gets the stats then.

        Does nothing where the loop holds the books for long; so tell the loop as well.
        """
        if not self._books.acquire(timeout=0 if self._books_held else _BOOKS_TIMEOUT):
            self._books_held = True  # whoever calls has other messages to pass on: wait only once
            return
        try:
            self.abort_requests(request_ids)
            report(self.stats())  # before the loop can count on: counters never fall
        finally:
            self._books.release()

    def has_work(self) -> bool:
        if self._outputs or self._is_busy():
            return True
        return self.lockstep is not None and self.lockstep.running

    def _is_busy(self) -> bool:
        busy = bool(self._inflight) or self.scheduler.has_work()
        return busy or self._transfers.has_pending()

    def step(self) -> list[EngineOutput]:
        """One turn of the loop; may return nothing. An exception leaves device state undefined,
        and ends the worker of a coupled rank: those of the others wait for it in vain."""
        with self._books:
            if self.lockstep is None:
                return self._step()
            try:
                return self._step()
            except Interrupted:
                return []
            except Exception as error:
                if self._worker is not None:
                    self._worker.abandon(_as_death(error))
                raise

    def _step(self) -> list[EngineOutput]:
        began = time.perf_counter()
        self._end_failed_grammars()
        self._end_failed_loads()
        outputs, self._outputs = self._outputs, []
        if self.lockstep is not None and not self.lockstep.takes_part(self._is_busy()):
            return outputs
        planned = False
        if len(self._inflight) < self.depth:
            planned = self._plan_ahead()
        if self._inflight and not (planned and len(self._inflight) < self.depth):
            outputs += self._finish_oldest(began)
        else:
            self._stats.host_seconds += time.perf_counter() - began
            if not planned and not outputs:
                # All that is left waits for something else, a grammar being compiled say.
                time.sleep(0.001)
        return outputs

    def _plan_ahead(self) -> bool:
        shape: Bucket | str | None = None
        began = time.perf_counter()
        if self._speculator is not None:
            in_flight = [step.batch.bucket for step in self._inflight]
            shape = self._speculator.choose(self._shards[0], in_flight, self.depth)
            if shape == WAIT:
                return False
        plans = [shard.schedule() if shard.has_work() else None for shard in self._shards]
        live = [plan for plan in plans if plan is not None]
        self._transfers.dispatch(plans)
        if self.lockstep is not None:
            return self._submit_together(self.lockstep, plans)
        if not live:
            return False
        num_drafts = (0, 0)
        if self._speculator is not None:
            num_drafts = self._speculator.planned(live[0])
        tables = [shard.block_tables for shard in self._shards]
        if num_drafts[0] and isinstance(shape, Bucket):
            batch = self._packers[0].pack_verify(live[0], tables[0], shape)
        else:
            batch = pack_step(self._packers, plans, tables, self.executor.choose)
        handle = self.executor.submit(batch)
        self._submitted(InFlight(plans, batch, handle, batch.masked, num_drafts, began))
        return True

    def _submit_together(self, lockstep: Lockstep, plans: list[StepPlan | None]) -> bool:
        """The step of coupled ranks: in the shape that they agree on, without tokens if it must."""
        agreed = lockstep.agree(plans, self._is_busy())
        shape = agreed.shape
        if shape is None:
            return False
        tables = [shard.block_tables for shard in self._shards]
        batch = pack_step(self._packers, plans, tables, lambda *_: shape)
        assert self._worker is not None
        handle = self._worker.submit(batch, agreed.cold)
        self._submitted(InFlight(plans, batch, handle, batch.masked))
        return True

    def _submitted(self, step: InFlight) -> None:
        self._inflight.append(step)
        live = [plan for plan in step.plans if plan is not None]
        if step.batch.masked and not any(plan.pending_grammar for plan in live):
            self._sample(step)
        if live:
            self._figures.submitted(step.batch.bucket, live)
            self._stats.num_steps += 1
            self._stats.step_tokens += sum(plan.num_tokens for plan in live)

    def _publish_events(self) -> None:
        if self._events is not None:
            self._events.publish(self.scheduler.take_events())

    def _sample(self, step: InFlight) -> None:
        bucket, plan = step.batch.bucket, step.plans[0]
        if bucket.drafts and plan is not None:
            masks = draft_masks(plan, bucket, self.built.spec.vocab_size)
        else:
            masks = self._grammars.masks(step.plans, step.batch.sampler_rows)
        self.executor.sample(step.handle, masks)
        step.unsampled = False

    def _finish_oldest(self, began: float) -> list[EngineOutput]:
        step = self._inflight.popleft()
        waited = time.perf_counter()
        results = self._result(step)
        done = time.perf_counter()
        updates = [
            (self._reconcile(shard, plan, result), result)
            for shard, plan, result in zip(self._shards, step.plans, results, strict=True)
            if plan is not None
        ]
        if self._speculator is not None and step.plans[0] is not None:
            # All time since the step before: what the host did between counts too.
            seconds = done - (self._last_done or step.began)
            self._speculator.finished(
                step.plans[0], results[0], updates[0][0], step.num_drafts, seconds
            )
        self._last_done = done if self._is_busy() else 0.0
        # First what the device waits for, then what the client waits for.
        if self._inflight and self._inflight[0].unsampled:
            self._sample(self._inflight[0])
        outputs = [self._collected.output(u, result) for batch, result in updates for u in batch]
        self._stats.nan_rows += sum(output.error == NAN_ERROR for output in outputs)
        self._publish_events()
        ended = time.perf_counter()
        self._stats.step_seconds += ended - began
        self._stats.host_seconds += (ended - began) - (done - waited)
        return outputs

    def _result(self, step: InFlight) -> list[StepResult]:
        self._books_held = False
        self._books.release()
        try:
            return self.executor.result(step.handle)
        finally:
            self._books.acquire()

    def _end_failed_grammars(self) -> None:
        for request, reason in self._grammars.failed():
            if self.scheduler.abort([request.request_id]):
                self._collected.drop(request.request_id)
                self._outputs.append(refusal(request.request_id, reason))

    def _end_failed_loads(self) -> None:
        for request_id, reason in self._transfers.poll():
            if self.scheduler.abort([request_id]):
                self._collected.drop(request_id)
                self._outputs.append(
                    EngineOutput(request_id, [], finish_reason="error", error=reason)
                )

    def _reconcile(self, shard: Scheduler, plan: StepPlan, result: StepResult) -> UpdateBatch:
        self._collected.add(plan, result)
        updates = shard.update(plan, result)
        self._figures.reconciled(plan, len(updates))
        return updates

    # -- faults -----------------------------------------------------------------------------

    @property
    def worker_alive(self) -> bool:
        return self._worker is None or self._worker.alive

    @property
    def epoch(self) -> int:
        """How often the worker process was replaced."""
        return 0 if self._worker is None else self._worker.epoch

    def watch_worker(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called, in another thread, when the worker process is gone."""
        if self._worker is not None:
            self._worker.watch(on_end)

    def check_worker(self) -> None:
        """Raises WorkerDied if it did."""
        if self._worker is not None:
            self._worker.check()

    def on_fault(self) -> None:
        """A step failed: end every request, forget every prefix and what is in flight. Asks
        nothing of the device. No outputs are made; the caller knows whom to tell."""
        with self._books:
            self._inflight.clear()
            self._last_done = 0.0
            self._outputs.clear()
            self._collected = Collected()
            try:
                self.scheduler.on_fault()
                self.scheduler.abort()
                self.scheduler.check_integrity()
                self._publish_events()
            except Exception:  # noqa: BLE001 - the fault may have been in the scheduler itself
                log.exception("the fault broke the scheduler's books; they are begun anew")
                self._plan_afresh()
                if self._events is not None:
                    self._events.publish([AllBlocksCleared()])

    def recover(self, respawn: bool) -> None:
        """After `on_fault`: an empty device state; with `respawn`, in a new worker process.

        Raises what the executor raises; may be called again then.
        """
        if self.lockstep is not None:
            self.lockstep.rejoin()
        elif respawn:
            if self._worker is None:
                raise ValueError("respawn needs --enable-fault-tolerance")
            self._worker.respawn()
            if self._sleep_level:
                self._worker.sleep(self._sleep_level)
                self._worker.wake_up("weights" not in self._asleep, "kv_cache" not in self._asleep)
        elif not self._asleep:  # who sleeps has no state to lose
            self.executor.reset()

    # -- figures and calls ------------------------------------------------------------------

    def stats(self) -> EngineStats:
        with self._books:
            return self._take_stats()

    def _take_stats(self) -> EngineStats:
        stats, scheduler = self._stats, self.scheduler
        stats.num_running = scheduler.num_running
        stats.num_waiting = scheduler.num_waiting
        stats.kv_usage = scheduler.kv_usage
        stats.num_preemptions = scheduler.num_preemptions
        stats.prefix_queries = scheduler.prefix_queries
        stats.prefix_hits = scheduler.prefix_hits
        figures = self.executor.stats()
        stats.num_compilations = int(figures["num_compilations"])
        stats.compilations_after_warmup = int(figures["compilations_after_warmup"])
        stats.extra = {name: n for name, n in figures.items() if name.startswith("dbo_")}
        stats.extra |= self._transfers.stats()
        if self._speculator is not None:
            stats.extra |= self._speculator.stats.figures()
        if self.lockstep is not None:
            stats.extra |= self.lockstep.figures()
        stats.extra |= self._figures.figures(self._sleep_level)
        if self._events is not None:
            stats.extra |= self._events.counts.snapshot()
        loading = sum(len(shard.state.loading) for shard in self._shards)
        stats.extra["waiting_deferred"] = float(self._grammars.num_waiting + loading)
        if self._transfers.is_open:
            stats.extra["kv_fetch_in_progress"] = float(loading)
        stats.block_seconds = _joined([shard.take_residency() for shard in self._shards])
        return stats

    def utility(self, method: str, args: list[Any]) -> Any:
        """A named call from a client (`engine.controls`). Raises ValueError for an unknown name."""
        with self._books:
            return control(self, method, args)

    def ready(self) -> EngineReady:
        sched_sizes = self.built.sched_sizes
        return EngineReady(
            max_model_len=sched_sizes.max_model_len,
            num_blocks=sched_sizes.num_blocks * len(self._shards),
            block_size=sched_sizes.block_size,
            vocab_size=self.built.spec.vocab_size,
            info=self.built.info,
        )

    def shutdown(self) -> None:
        self._inflight.clear()
        self._profiler.close()
        self._grammars.shutdown()
        if self._events is not None:
            self._events.close()
        if self.lockstep is not None:
            self.lockstep.close()
        self.executor.shutdown()
        self._transfers.close()  # after the device, which writes into its memory


def _joined(parts: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: [x for part in parts for x in part[name]] for name in parts[0]}


def _as_death(error: Exception) -> WorkerDied:
    return error if isinstance(error, WorkerDied) else WorkerDied(f"a step failed: {error}")
