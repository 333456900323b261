"""The engine core: takes requests, runs the step loop, gives back tokens.

    while there is work:
        end the requests whose grammar failed to compile, or whose KV could not be loaded
        if room in the pipeline: plan, pack, submit          (never waits for the device)
        if room is left: plan ahead instead of waiting
        take the oldest step's result; reconcile; output

The last three lines are `engine.pipeline`. A rank that shares experts with others agrees with them
on every step (`engine.coupled.lockstep`); it runs a step without tokens when only they have work.

Depth 1 is the synchronous engine, depth 2 the asynchronous one; there is no second loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.config import EngineConfig
from jaxengine.engine.absent import Alone, NoDrafts
from jaxengine.engine.assemble import assemble, speculator_of
from jaxengine.engine.outputs import make_request, refusal
from jaxengine.engine.pipeline import Pipeline
from jaxengine.executor.coupling import Interrupted
from jaxengine.executor.profile import Profiler
from jaxengine.sched.block_map import SHARED, block_states
from jaxengine.sched.kv_events import AllBlocksCleared
from jaxengine.sched.scheduler import Scheduler
from jaxengine.sched.sharded import ShardedScheduler
from jaxengine.speculate.config import parse_speculative_config
from jaxengine.wire.messages import (
    EngineOutput,
    EngineReady,
    EngineRequest,
    EngineStats,
)

if TYPE_CHECKING:
    from jaxengine.engine.coupled.lockstep import Lockstep

log = logging.getLogger(__name__)

SLEEPERS = ("weights", "kv_cache")  # what leaves the device, and can be woken alone
_IDLE = 0.001  # seconds between looks at what is waited for


class EngineCore:
    """One model on one device. One thread calls it; another may call `abort_early`."""

    def __init__(self, config: EngineConfig) -> None:
        """Load, compile and allocate. Raises ValueError and the loader's errors."""
        self._parts = parts = assemble(config)
        self.config = config
        self.facts = parts.facts
        self.executor = parts.executor
        self._state_lock = parts.lock
        # One step more than there are stages: each has work while the next is planned.
        stages = config.parallel.pipeline_parallel_size
        depth = 1 + stages if config.scheduler.async_scheduling else 1
        sizes, shards = parts.facts.sched_sizes, parts.facts.num_shards
        self._stats = EngineStats(pipeline_depth=depth, num_blocks=sizes.num_blocks * shards)
        self.pipeline = Pipeline(parts, depth, self._stats)
        self._begin()
        self._profiler = Profiler(config)
        self._sleep_level = 0  # 0: wholly awake
        self._asleep: frozenset[str] = frozenset()  # of `SLEEPERS`
        self._outputs: list[EngineOutput] = []  # made outside of steps

    def _begin(self) -> None:
        """A scheduler without requests, over empty pools."""
        facts, parts = self.facts, self._parts
        shards = [
            Scheduler(
                facts.sched_sizes,
                connector=parts.transfers.connector(shard),
                record_events=parts.events.records,
            )
            for shard in range(facts.num_shards)
        ]
        parts.transfers.bind(shards)
        self.scheduler: Scheduler | ShardedScheduler = (
            shards[0] if len(shards) == 1 else ShardedScheduler(shards)
        )
        self.pipeline.begin(self.scheduler)

    @property
    def lockstep(self) -> Lockstep | None:
        """The lockstep with ranks that share its experts; None for an engine that steps alone."""
        peers = self._parts.peers
        return None if isinstance(peers, Alone) else peers

    def use_speculation(self, setting: str | dict[str, Any] | None) -> None:
        """Speculate otherwise from now on (None: not at all), within the K that the engine was
        started for. For benches and tests, between requests. Raises ValueError."""
        if self.has_work():
            raise ValueError("use_speculation is for an engine without requests")
        speculation = None if setting is None else parse_speculative_config(setting)
        most = 0 if speculation is None else speculation.num_speculative_tokens
        if most > self.facts.sched_sizes.max_drafts:
            raise ValueError(
                f"speculative_config asks for {most} drafts, but the engine was started for "
                f"{self.facts.sched_sizes.max_drafts}"
            )
        self.pipeline.speculation = NoDrafts()
        if speculation is not None and most:
            self.pipeline.speculation = speculator_of(
                self.config, self.executor, self.facts, speculation
            )

    # -- requests ---------------------------------------------------------------------------

    def add_request(self, wire: EngineRequest) -> None:
        """Queue a request. One that cannot run ends alone, with an error output."""
        with self._state_lock:
            try:
                request = make_request(
                    wire,
                    self.facts.sched_sizes.max_model_len,
                    self._parts.packers[0],
                    self._parts.grammars,
                )
                self.scheduler.add(request)
                if request.grammar is not None:
                    self._parts.grammars.watch(request)
            except ValueError as error:
                self._outputs.append(refusal(wire.request_id, str(error)))

    def abort_requests(self, request_ids: list[str]) -> None:
        """End these; unknown ids are skipped. No output is made for them."""
        with self._state_lock:
            for request in self.scheduler.abort(request_ids):
                self.pipeline.collected.drop(request.request_id)

    def abort_early(self, request_ids: list[str], report: Callable[[EngineStats], None]) -> None:
        """`abort_requests` from another thread, while a step runs: their slots and blocks are free
        for the next plan. Steps in flight may still write there, but before their next owner
        (the device works in order). `report` gets the stats then.

        Does nothing where the loop holds the lock for long; so tell the loop as well.
        """
        with self._state_lock.taken_soon() as held:
            if held:
                self.abort_requests(request_ids)
                report(self.stats())  # before the loop can count on: counters never fall

    def has_work(self) -> bool:
        """There is something to do for `step`, or for other ranks that need this one."""
        return bool(self._outputs) or self.pipeline.busy or self._parts.peers.running

    # -- the loop ---------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """One turn of the loop; may return nothing. An exception leaves device state undefined,
        and ends the worker of a coupled rank: those of the others wait for it in vain."""
        with self._state_lock:
            try:
                return self._turn()
            except Interrupted:
                return []
            except Exception as error:
                self._parts.peers.failed(error)
                raise

    def _turn(self) -> list[EngineOutput]:
        began = time.perf_counter()
        self._end_failed()
        outputs, self._outputs = self._outputs, []
        if not self._parts.peers.takes_part(self.pipeline.busy):
            return outputs
        made = self.pipeline.turn(began)
        if made is None and not outputs:
            time.sleep(_IDLE)
        return outputs + (made or [])

    def _end_failed(self) -> None:
        ended = [
            refusal(request.request_id, reason) for request, reason in self._parts.grammars.failed()
        ]
        ended += [
            EngineOutput(request_id, [], finish_reason="error", error=reason)
            for request_id, reason in self._parts.transfers.poll()
        ]
        for output in ended:
            if self.scheduler.abort([output.request_id]):
                self.pipeline.collected.drop(output.request_id)
                self._outputs.append(output)

    # -- calls ------------------------------------------------------------------------------

    def utility(self, method: str, args: list[Any]) -> Any:
        """A named call from a client, between steps. Raises ValueError for an unknown name, and
        what the call raises."""
        calls: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self.reset_prefix_cache,
            "kv_blocks": self.kv_blocks,
            "check_integrity": self.scheduler.check_integrity,
            "pause": self.pause,
            "resume": self.resume,
            "is_paused": lambda: self.scheduler.is_paused,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "is_sleeping": lambda: bool(self._asleep),
            "wait_warm": self.executor.wait_warm,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
        }
        if method not in calls:
            raise ValueError(f"unknown call {method!r}")
        with self._state_lock:
            return calls[method](*args)

    def kv_blocks(self) -> dict[str, int]:
        """Numbers of KV blocks: in all, used by requests, and free but still cached."""
        pools = [block_states(shard.state.kv.pool) for shard in self.scheduler.shards]
        counts = sum(np.bincount(states, minlength=SHARED + 1) for states in pools)
        _, cached, owned, shared = np.asarray(counts).tolist()
        return {"total": sum(map(len, pools)), "used": owned + shared, "cached": cached}

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget cached prefixes; with `reset_running` running requests start over for it."""
        done = self.scheduler.reset_prefix_cache(reset_running)
        self.pipeline.publish_events()
        return done

    def pause(self, mode: str = "wait") -> None:
        """abort: running requests end now; wait: they finish first; keep: they stand still."""
        for request in self.scheduler.pause(mode):
            self.pipeline.collected.drop(request.request_id)
            self._outputs.append(EngineOutput(request.request_id, [], finish_reason="abort"))

    def resume(self) -> None:
        """Undo a pause. A sleeping engine has nothing to run with: it goes on at `wake_up`."""
        if not self._asleep:
            self.scheduler.resume()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the device's memory back. What runs is ended ("abort"), or goes on after `wake_up`
        from the beginning of its KV ("keep"). Raises ValueError for the level or the mode."""
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, got {level}")
        if mode not in ("abort", "keep"):
            raise ValueError(f"sleep mode must be abort or keep, got {mode!r}")
        self._parts.peers.check_sleep()
        if self._asleep:
            return
        self.pause(mode)
        while self.pipeline.in_flight:  # nothing may use the memory that goes
            self._outputs += self.pipeline.finish_oldest(time.perf_counter())
        self._parts.transfers.settle()
        self.reset_prefix_cache(reset_running=True)
        self.executor.sleep(level)
        self._sleep_level, self._asleep = level, frozenset(SLEEPERS)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Bring weights and pool back, or those that `tags` name, and go on with what is queued
        once both are there. Returns whether they are. Raises ValueError for another tag."""
        wanted = frozenset(SLEEPERS if tags is None else tags)
        unknown = sorted(wanted - set(SLEEPERS))
        if unknown:
            raise ValueError(f"tags must be among {', '.join(SLEEPERS)}, got {unknown[0]!r}")
        woken = wanted & self._asleep
        if woken:
            self.executor.wake_up("weights" in woken, "kv_cache" in woken)
            self._asleep -= woken
        if self._asleep:
            return False
        self._sleep_level = 0
        self.scheduler.resume()
        return True

    # -- faults -----------------------------------------------------------------------------

    @property
    def worker_alive(self) -> bool:
        return self._parts.process.alive

    @property
    def epoch(self) -> int:
        """Number of times that the worker process was replaced."""
        return self._parts.process.epoch

    def watch_worker(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called, in another thread, when the worker process is gone."""
        self._parts.process.watch(on_end)

    def check_worker(self) -> None:
        """Raises WorkerDied if it did."""
        self._parts.process.check()

    def on_fault(self) -> None:
        """A step failed: end every request, forget every prefix and what is in flight. Asks
        nothing of the device. No outputs are made; the caller knows whom to tell."""
        with self._state_lock:
            self.pipeline.forget()
            self._outputs.clear()
            try:
                self.scheduler.on_fault()
                self.scheduler.abort()
                self.scheduler.check_integrity()
                self.pipeline.publish_events()
            except Exception:  # noqa: BLE001 - the fault may have been in the scheduler itself
                log.exception("the fault broke the scheduler's state; it starts from an empty one")
                self._begin()
                self._parts.events.publish([AllBlocksCleared()])

    def recover(self, respawn: bool) -> None:
        """Give the device an empty state after `on_fault`; with `respawn`, in a new worker process.

        Raises what the executor raises; may be called again then.
        """
        if self._parts.peers.rejoin():
            return
        if respawn:
            self._parts.process.respawn()
            if self._sleep_level:
                self.executor.sleep(self._sleep_level)
                self.executor.wake_up("weights" not in self._asleep, "kv_cache" not in self._asleep)
        elif not self._asleep:  # who sleeps has no state to lose
            self.executor.reset()

    # -- stats ------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""
        with self._state_lock:
            return self._take_stats()

    def _take_stats(self) -> EngineStats:
        stats, scheduler, parts = self._stats, self.scheduler, self._parts
        stats.num_running = scheduler.num_running
        stats.num_waiting = scheduler.num_waiting
        stats.kv_usage = scheduler.kv_usage
        stats.num_preemptions = scheduler.num_preemptions
        stats.prefix_queries = scheduler.prefix_queries
        stats.prefix_hits = scheduler.prefix_hits
        device = self.executor.stats()
        stats.num_compilations = int(device["num_compilations"])
        stats.compilations_after_warmup = int(device["compilations_after_warmup"])
        stats.extra = {name: n for name, n in device.items() if name.startswith("dbo_")}
        counting = (parts.transfers, self.pipeline.speculation, parts.peers, parts.counts)
        for part in (*counting, parts.events):
            stats.extra |= part.stats()
        stats.extra["sleep_level"] = float(self._sleep_level)
        loading = sum(len(shard.state.loading) for shard in scheduler.shards)
        stats.extra["waiting_deferred"] = float(parts.grammars.num_waiting + loading)
        if parts.transfers.is_open:
            stats.extra["kv_fetch_in_progress"] = float(loading)
        stats.block_seconds = _joined([shard.take_residency() for shard in scheduler.shards])
        return stats

    def ready(self) -> EngineReady:
        """What the front must know before the first request."""
        sizes = self.facts.sched_sizes
        return EngineReady(
            max_model_len=sizes.max_model_len,
            num_blocks=sizes.num_blocks * self.facts.num_shards,
            block_size=sizes.block_size,
            vocab_size=self.facts.spec.vocab_size,
            info=self.facts.info,
        )

    def shutdown(self) -> None:
        """End the device's process if it has one, and free what is open."""
        self.pipeline.forget()
        self._profiler.close()
        self._parts.grammars.shutdown()
        self._parts.events.close()
        self._parts.peers.close()
        self.executor.shutdown()
        self._parts.transfers.close()  # after the device, which writes into its memory


def _joined(parts: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: [x for part in parts for x in part[name]] for name in parts[0]}
