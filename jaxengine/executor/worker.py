"""The executor whose device lives in a worker process, which may die without this one. No JAX."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxengine.config import EngineConfig
from jaxengine.executor.facts import Facts
from jaxengine.executor.inject import Injector, carry_out
from jaxengine.executor.worker_messages import (
    Answer,
    Call,
    Compile,
    OpenSpeculation,
    OpenTransfers,
    Pool,
    Programs,
    Reply,
    Sample,
    Started,
    StartFailed,
    StepDone,
    StepFailed,
    Stop,
    Submit,
    Transfer,
    TransfersDone,
    keys_of,
)
from jaxengine.executor.worker_process import PeerFailed, WorkerDied, WorkerError, WorkerProcess
from jaxengine.sched.batch import Bucket
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import Int32, StepResult
from jaxengine.sched.shapes import ProgramKey, ShapeChooser, VerifyChooser
from jaxengine.settings.coupling import moved
from jaxengine.settings.fault import fault_settings
from jaxengine.settings.faults import Fault, parse_faults

if TYPE_CHECKING:
    from jaxengine.offload.host_pool import PagePool
    from jaxengine.offload.jobs import Done, OffloadStep
    from jaxengine.offload.layout import KVLayout

log = logging.getLogger(__name__)

_RESTART_TIMEOUT = 600.0  # seconds in which a respawned worker must be ready
_SLOW_CALLS = ("sleep", "wake_up", "open_transfers")  # they move weights, or compile
_SLOW_CALL_TIMEOUT = 600.0
_COMPILING_CALLS = ("wait_warm", "open_speculation")  # they may wait for every program
_STOP_GRACE = 4.0
_FIGURES = {"num_compilations": 0.0, "compilations_after_warmup": 0.0, "warm": 0.0}


class WorkerExecutor:
    """See `Executor`. One thread calls it; `alive` may be read by any.

    After WorkerError the worker lives and wants a `reset`; after WorkerDied only `respawn` helps.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start a worker and wait until it can run. Raises ValueError for a setting that cannot
        work, WorkerDied or WorkerError for everything else, with the worker's traceback."""
        self._settings = fault_settings(config.fault)
        self._injector = Injector(parse_faults(config.fault.inject_faults))
        self._config = config
        self._changed = threading.Condition()
        self._transfers: tuple[list[Pool], KVLayout] | None = None  # what was opened
        # What was opened for drafts: shapes, lookup, warm-up.
        self._speculation: tuple[list[tuple[int, int]], tuple[int, int], str] | None = None
        self._verify_chooser = VerifyChooser((), "lazy", self._is_ready)
        self._on_end: Callable[[], None] | None = None
        self._next = 0  # step and call numbers
        self._steps_cold: dict[int, bool] = {}  # submitted, by number: a program is not compiled
        self._death: WorkerDied | None = None
        self._failed: StepFailed | None = None  # with all steps after it
        self._broken_ports: set[int | None] = set()  # of coupled groups
        self.epoch = 0
        self._process = self._begin(config)
        self.facts = self._wait_ready(None)
        self._chooser = self._new_chooser()

    # -- life -------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._death is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called, in another thread, when the worker ends without being asked to."""
        self._on_end = on_end
        if not self.alive:
            on_end()

    @property
    def ready_programs(self) -> frozenset[ProgramKey]:
        """The compiled programs as of the worker's last message."""
        return self._ready_programs

    @property
    def warm(self) -> bool:
        """All of its programs are compiled."""
        return self._figures["warm"] > 0

    def check(self) -> None:
        """Raises WorkerDied if it did."""
        if self._death is not None:
            raise self._death

    def abandon(self, why: WorkerDied, port: int | None = None) -> None:
        """Kill the worker for a fault that is not its own. Any thread may call it. `port`: only
        if the worker belongs to the coupled group there."""
        with self._changed:
            if port not in (None, self._config.parallel.master_port):
                self._broken_ports.add(port)  # it may be the group that is joined next
                return
            if self._death is not None:
                return
            self._death = why
            self._changed.notify_all()
            self._process.abandon(why)

    def respawn(self, port: int | None = None) -> None:
        """Replace the worker, dead or alive, by a new one of the same sizes; `port`: in the coupled
        group there.

        Raises WorkerDied when that one does not come up, ValueError when its sizes differ.
        """
        self._process.close()
        with self._changed:
            if port in self._broken_ports:
                raise PeerFailed("another rank of the group failed before this one joined")
            self._broken_ports.clear()
            self.epoch += 1
            if port is not None:
                self._config = moved(self._config, port)
            self._process = self._begin(_same_sizes(self._config, self.facts))
        try:
            found = self._wait_ready(_RESTART_TIMEOUT)
            if found.sched_sizes != self.facts.sched_sizes or found.spec != self.facts.spec:
                raise ValueError("the model changed on disk; restart the server to load it")
        except ValueError:
            self._process.close()
            self._death = WorkerDied("the new worker process cannot take over")
            raise
        self._chooser = self._new_chooser()
        self._send_speculation()
        self._send_pools()

    def _begin(self, config: EngineConfig) -> WorkerProcess:
        self._death = None
        self._ready_programs: frozenset[ProgramKey] = frozenset()
        self._figures = dict(_FIGURES)
        self._started: Started | StartFailed | None = None
        self._heard = time.monotonic()  # when the last message came
        self._answers: dict[int, Answer] = {}
        self._forget_steps()
        epoch = self.epoch
        return WorkerProcess(
            config,
            self._receive,
            lambda error: self._worker_ended(epoch, error),
            self._settings.compile_timeout_sec,
        )

    def _wait_ready(self, timeout: float | None) -> Facts:
        self._wait(lambda: self._started is not None, timeout, "it did not start")
        started = self._started
        assert started is not None
        if isinstance(started, Started):
            return started.facts
        self._process.close(_STOP_GRACE)
        failure = ValueError if started.user_error else WorkerDied
        self._death = WorkerDied(started.message)
        error = failure(started.message)
        error.add_note(f"In the worker process:\n{started.traceback}")
        raise error

    def _worker_ended(self, epoch: int, error: WorkerDied) -> None:
        with self._changed:
            if epoch != self.epoch:
                return
            self._death = error
            self._changed.notify_all()
        log.error("%s", error)
        if self._on_end is not None:
            self._on_end()

    def _receive(self, message: Reply) -> None:
        with self._changed:
            self._heard = time.monotonic()
            match message:
                case StepDone():
                    self._results[message.step] = message
                case StepFailed():
                    self._failed = message
                case TransfersDone():
                    self._transfers_done.append(message)
                    self._moving -= sum(map(len, message.shards))
                    self._moved_at = time.monotonic()
                case Answer():
                    self._answers[message.call] = message
                case Programs():
                    self._ready_programs = frozenset(message.ready)
                    self._figures = message.figures
                case Started() | StartFailed():
                    self._started = message
            self._changed.notify_all()

    # -- steps ------------------------------------------------------------------------------

    def choose(
        self, num_tokens: int, num_rows: int, decode_only: bool, fewest_tokens: int
    ) -> tuple[Bucket, int]:
        return self._chooser.choose(num_tokens, num_rows, decode_only, fewest_tokens)

    def submit(self, batch: Batch, cold: bool = False) -> int:
        """`cold`: a program of the step is still being compiled elsewhere. Raises WorkerDied."""
        self.check()
        fault = self._planned("step")
        step = self._number()
        self._steps_cold[step] = cold or not all(
            map(self._is_ready, keys_of(batch, self._is_ready))
        )
        self._chooser.count(self._verify_chooser.outcome(batch.bucket))
        self._process.send(Submit(step, batch, fault))
        return step

    def sample(self, handle: Any, mask: Int32) -> None:
        self._process.send(Sample(handle, mask))

    def result(self, handle: Any) -> list[StepResult]:
        """Raises WorkerError when the step failed in the worker, WorkerDied when that is gone or
        took longer than the watchdog allows (it is killed then)."""
        settings = self._settings
        cold = self._steps_cold.pop(handle)
        limit = settings.compile_timeout_sec if cold else settings.step_timeout_sec
        self._wait(
            lambda: handle in self._results or self._lost(handle),
            limit,
            f"a step took more than {limit:g} s",
            settings.silence_sec if cold else None,  # else the limit is as short
        )
        done = self._results.pop(handle, None)
        if done is None:
            raise self._failure()
        return done.results

    def _lost(self, step: int) -> bool:
        return self._failed is not None and self._failed.step <= step

    def _failure(self) -> WorkerError:
        assert self._failed is not None
        return WorkerError(self._failed.kind, self._failed.message)

    def reset(self) -> None:
        """Raises WorkerError or WorkerDied."""
        self._call("reset", self._planned("reset"))
        with self._changed:
            self._forget_steps()

    def _forget_steps(self) -> None:
        self._results: dict[int, StepDone] = {}
        self._failed = None
        self._steps_cold.clear()
        self._transfers_done: list[TransfersDone] = []
        self._moving = 0  # transfers under way
        self._moved_at = 0.0

    # -- drafts -----------------------------------------------------------------------------

    def open_speculation(
        self, shapes: Sequence[tuple[int, int]], lookup: tuple[int, int], warmup: str
    ) -> None:
        """See `Verifier`. Raises WorkerError or WorkerDied."""
        self._speculation = (list(shapes), lookup, warmup)
        overlap = self.facts.step_shapes.overlap
        self._verify_chooser = VerifyChooser(shapes, warmup, self._is_ready, overlap)
        self._send_speculation()

    def _send_speculation(self) -> None:
        if self._speculation is not None:
            call = self._number()
            self._ask(OpenSpeculation(call, *self._speculation), call, "open_speculation")

    def choose_verify(self, num_rows: int, num_drafts: int) -> Bucket | None:
        """See `Verifier`."""
        return self._verify_chooser.choose(num_rows, num_drafts)

    def _is_ready(self, key: ProgramKey) -> bool:
        return key in self._ready_programs

    # -- KV offload -------------------------------------------------------------------------

    def open_transfers(self, pools: Sequence[PagePool], layout: KVLayout) -> None:
        """The pools are shared ones. Raises WorkerError or WorkerDied."""
        self._transfers = (
            [Pool(pool.address, pool.num_slots, pool.page_bytes) for pool in pools],
            layout,
        )
        self._send_pools()

    def _send_pools(self) -> None:
        if self._transfers is not None:
            call = self._number()
            self._ask(OpenTransfers(call, *self._transfers), call, "open_transfers")

    def transfer(self, steps: Sequence[OffloadStep | None]) -> None:
        """Raises WorkerDied."""
        self.check()
        with self._changed:
            jobs = (len(step.stores) + len(step.loads) for step in steps if step is not None)
            self._moving += sum(jobs)
            self._moved_at = time.monotonic()
        self._process.send(Transfer(self._number(), list(steps)))

    def poll_transfers(self) -> list[list[Done]]:
        """Raises WorkerError when a transfer failed and no step is waited for, which would tell;
        WorkerDied when the worker is gone or nothing moved for too long (it is killed then)."""
        self.check()
        with self._changed:
            messages, self._transfers_done = self._transfers_done, []
            if self._failed is not None and not self._steps_cold:
                raise self._failure()
            limit = self._settings.compile_timeout_sec
            hung = self._moving > 0 and time.monotonic() - self._moved_at > limit
        if hung:
            self._wait(lambda: False, 0.0, f"no KV moved for {limit:g} s")
        shards = len(self._transfers[0]) if self._transfers is not None else 0
        return [[done for m in messages for done in m.shards[i]] for i in range(shards)]

    # -- calls ------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        self._call("sleep", None, level)

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        self._call("wake_up", None, weights, kv_cache)

    def wait_warm(self) -> None:
        self._call("wait_warm", None)

    def stats(self) -> dict[str, float]:
        """The stats of the worker's last message; does not ask it."""
        return self._figures | self._chooser.stats()

    def shutdown(self) -> None:
        if self.alive:
            with contextlib.suppress(WorkerDied):
                self._process.send(Stop())
        self._process.close(_STOP_GRACE if self.alive else 0.0)

    def _call(self, method: str, fault: Fault | None, *args: int) -> None:
        self.check()
        call = self._number()
        self._ask(Call(call, method, list(args), fault), call, method)

    def _ask(self, message: Call | OpenSpeculation | OpenTransfers, call: int, method: str) -> None:
        self._process.send(message)
        limit: float | None = self._settings.step_timeout_sec
        silence = None
        if method in _SLOW_CALLS:
            limit = _SLOW_CALL_TIMEOUT
        elif method in _COMPILING_CALLS:
            limit, silence = None, self._settings.silence_sec
        self._wait(lambda: call in self._answers, limit, f"{method} took too long", silence)
        answer = self._answers.pop(call)
        if answer.kind is not None:
            raise WorkerError(answer.kind, answer.message)

    def _wait(
        self,
        done: Callable[[], bool],
        limit: float | None,
        what: str,
        silence: float | None = None,
    ) -> None:
        """Wait for `done` or the worker's end; kills it after `limit` seconds, or when it says
        nothing for `silence` seconds, though it should every second. Raises WorkerDied."""
        deadline = None if limit is None else time.monotonic() + limit
        with self._changed:
            while not done():
                if self._death is not None:
                    raise self._death
                now = time.monotonic()
                left = None if deadline is None else deadline - now
                if silence is not None:
                    quiet = self._heard + silence - now
                    if quiet <= 0:
                        what = f"it said nothing for {silence:g} s"
                    left = quiet if left is None else min(left, quiet)
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            else:
                return
        self._process.hung(what)
        self._wait(lambda: False, None, what)  # its end is told by the thread that reads

    def _planned(self, during: str) -> Fault | None:
        fault = self._injector.next(during)
        if fault is None:
            return None
        log.warning("injecting a fault: %s", fault)
        if fault.where == "engine":
            carry_out(fault)
            return None
        return fault

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _new_chooser(self) -> ShapeChooser:
        return ShapeChooser(self.facts.step_shapes, self._is_ready, self.compile)

    def compile(self, key: ProgramKey) -> None:
        """Begin to compile it in the worker. Raises WorkerDied."""
        self._process.send(Compile(key))


def _same_sizes(config: EngineConfig, found: Facts) -> EngineConfig:
    """Settings that give the worker before's sizes: free memory may differ by now."""
    sched_sizes = found.sched_sizes
    cache = replace(config.cache, num_gpu_blocks_override=sched_sizes.num_blocks)
    model = replace(config.model, max_model_len=sched_sizes.max_model_len)
    return replace(config, cache=cache, model=model)
