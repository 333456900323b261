"""The sentinel around the engine process's own loop, with a core that fails on demand."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from jaxengine.config import EngineConfig
from jaxengine.engine.fault.outbox import Outbox
from jaxengine.engine.fault.sentinel import RecoverableCore, Sentinel
from jaxengine.engine.process import _busy_loop
from jaxengine.engine.stub import StubEngineCore
from jaxengine.sampling_params import SamplingParams
from jaxengine.settings.fault import FaultSettings
from jaxengine.wire import frames as wire
from jaxengine.wire.messages import (
    UNAVAILABLE,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    FaultToleranceResult,
    RankStatus,
    UtilityCall,
    UtilityResult,
)

KINDS = {
    wire.OUTPUTS: EngineOutputs,
    wire.STATUS: RankStatus,
    wire.ORDER_RESULT: FaultToleranceResult,
    wire.RESULT: UtilityResult,
}


class FailingCore(StubEngineCore):
    """`fail` is raised by the next step; `lose_work` forgets a request without a word before."""

    worker_alive = True
    epoch = 0

    def __init__(self) -> None:
        super().__init__(EngineConfig.of(max_num_seqs=1))
        self.step_seconds = 0.005
        self.fail: BaseException | None = None
        self.lose_work = False
        self.faults = 0
        self.recoveries: list[str] = []
        self.recover_error: Exception | None = None
        self.recover_gate = threading.Event()
        self.recover_gate.set()
        self.on_end: Callable[[], None] = lambda: None

    def step(self) -> list[EngineOutput]:
        if self.fail is not None:
            error, self.fail = self.fail, None
            if self.lose_work:
                self._running.clear()
            raise error
        return super().step()

    def watch_worker(self, on_end: Callable[[], None]) -> None:
        self.on_end = on_end

    def check_worker(self) -> None:
        if not self.worker_alive:
            raise ConnectionError("the worker is gone")

    def on_fault(self) -> None:
        self.faults += 1
        self.shutdown()

    def recover(self, respawn: bool) -> None:
        self.recoveries.append("respawn" if respawn else "retry")
        self.recover_gate.wait(10)
        if self.recover_error is not None:
            error, self.recover_error = self.recover_error, None
            raise error
        self.worker_alive = True
        self.epoch += respawn


class Engine:
    """The sentinel, its loop in a thread, and all that it sent."""

    def __init__(self, **settings: Any) -> None:
        self.core = FailingCore()
        self.inbox: queue.SimpleQueue[tuple[bytes, Any]] = queue.SimpleQueue()
        self.stopping = threading.Event()
        self.sent: list[Any] = []
        self.arrived = threading.Condition()
        outbox = Outbox(self, 3)  # type: ignore[arg-type]
        settings = {"engine_recovery_timeout_sec": 30.0} | settings
        self.sentinel = Sentinel(
            self.core, FaultSettings(**settings), outbox, self.inbox, self.stopping, rank=3
        )
        self.died_of: BaseException | None = None
        loop = functools.partial(_busy_loop, self.core, self.inbox, outbox, self.stopping)
        self.thread = threading.Thread(target=self._run, args=(loop,))
        self.thread.start()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            self.sentinel.run(loop)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.died_of = error

    def send_multipart(self, frames: list[bytes]) -> None:
        with self.arrived:
            self.sent.append(msgspec.msgpack.decode(frames[1], type=KINDS[frames[0]]))
            self.arrived.notify_all()

    def wait(self, found: Callable[[], Any]) -> Any:
        with self.arrived:
            assert self.arrived.wait_for(found, 5), self.sent
            return found()

    @property
    def states(self) -> list[str]:
        return [m.state for m in self.sent if isinstance(m, RankStatus)]

    def outputs(self, name: str) -> list[EngineOutput]:
        every = [o for m in self.sent if isinstance(m, EngineOutputs) for o in m.outputs]
        return [o for o in every if o.request_id == name]

    def add(self, name: str, tokens: int = 10_000) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.sentinel.take(
            wire.ADD,
            EngineRequest(request_id=name, prompt_token_ids=[5], params=params, arrival_time=0.0),
        )

    def end_of(self, name: str) -> EngineOutput:
        return self.wait(lambda: [o for o in self.outputs(name) if o.finish_reason])[0]

    def order(self, name: str, instruction: str, **params: Any) -> None:
        order = {"request_id": name, "instruction": instruction, "params": params}
        self.sentinel.take(wire.ORDER, msgspec.msgpack.encode(order))

    def answer(self, name: str) -> FaultToleranceResult:
        def found() -> list[FaultToleranceResult]:
            answers = [m for m in self.sent if isinstance(m, FaultToleranceResult)]
            return [answer for answer in answers if answer.request_id == name]

        return self.wait(found)[0]

    def fault(self, error: BaseException | None = None, alive: bool = True) -> None:
        before = len(self.states)
        self.core.worker_alive = alive
        self.core.fail = error or RuntimeError("user text that must not leak")
        self.add(f"victim{before}")  # an idle engine takes no step
        self.wait(lambda: len(self.states) > before)


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engine = Engine(**settings)
        engines.append(engine)
        engine.wait(lambda: engine.states)  # its thread has begun
        return engine

    yield make
    for engine in engines:
        engine.core.recover_gate.set()
        engine.sentinel.take(wire.SHUTDOWN, None)
        engine.thread.join(5)
        assert not engine.thread.is_alive()


def test_fault_ends_all_requests_and_retry_brings_the_engine_back(
    start: Callable[..., Engine],
) -> None:
    engine = start()
    assert isinstance(engine.core, RecoverableCore)
    for name in ("running", "queued"):
        engine.add(name)
    engine.wait(lambda: engine.outputs("running"))
    engine.core.lose_work = True  # also what the core itself has lost gets its end
    engine.fault()
    status = [m for m in engine.sent if isinstance(m, RankStatus)][-1]
    assert (status.rank, status.state, status.fault_info) == (3, "unhealthy", "RuntimeError")
    assert engine.end_of("running").finish_reason == "abort"
    assert engine.end_of("queued").finish_reason == "abort"

    began = time.monotonic()
    engine.add("late")
    late = engine.end_of("late")
    assert (late.finish_reason, late.stop_reason) == ("error", UNAVAILABLE)
    engine.sentinel.take(wire.UTILITY, UtilityCall(7, "reset_prefix_cache"))
    [call] = engine.wait(lambda: [m for m in engine.sent if isinstance(m, UtilityResult)])
    assert call.error == "the engine is unhealthy"
    assert time.monotonic() - began < 5

    engine.order("o1", "retry")
    assert engine.answer("o1").success
    assert engine.core.recoveries == ["retry"] and engine.core.faults == 1
    assert engine.states == ["healthy", "unhealthy", "healthy"]
    assert [m for m in engine.sent if isinstance(m, RankStatus)][-1].fault_info is None
    engine.add("after", tokens=3)
    assert engine.end_of("after").finish_reason == "length"
    assert not engine.sentinel._open


def test_orders_that_are_refused(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.order("a", "retry")
    engine.order("b", "explode")
    engine.order("c", "retry", epoch=3)
    engine.sentinel.take(wire.ORDER, b"\xc1 no msgpack")
    engine.sentinel.take(wire.ORDER, msgspec.msgpack.encode({"request_id": "d", "instruction": 4}))
    assert engine.answer("a").reason == "rejecting retry: the engine is healthy"
    assert "unknown instruction 'explode'" in engine.answer("b").reason
    assert engine.answer("c").reason == "params: retry has no 'epoch'"
    assert "cannot be read" in engine.answer("").reason
    assert "cannot be read" in engine.answer("d").reason
    engine.fault(alive=False)
    assert engine.states[-1] == "dead"
    engine.order("e", "retry")
    assert engine.answer("e").reason == "rejecting retry: the engine is dead"
    engine.order("f", "respawn")
    assert engine.answer("f").success
    assert [m for m in engine.sent if isinstance(m, RankStatus)][-1].epoch == 1


def test_two_controllers_and_a_failed_recovery(start: Callable[..., Engine]) -> None:
    engine = start(engine_recovery_timeout_sec=0.5)
    engine.core.recover_gate.clear()
    engine.add("x")
    engine.fault()
    engine.order("first", "retry")
    engine.wait(lambda: engine.core.recoveries)
    engine.order("second", "respawn")
    assert engine.answer("second").reason == "rejecting respawn: a retry is in progress"
    time.sleep(0.6)  # the time-out passes while the retry runs: the retry has won
    engine.core.recover_gate.set()
    assert engine.answer("first").success
    assert engine.states[-1] == "healthy"

    engine.add("y")
    engine.core.recover_error = OSError("no memory")
    engine.fault()
    engine.order("third", "retry")
    assert engine.answer("third").reason == "retry failed: OSError"
    assert engine.states[-1] == "unhealthy"
    engine.order("fourth", "retry")
    assert engine.answer("fourth").success


def test_without_an_order_the_process_ends_of_its_fault(start: Callable[..., Engine]) -> None:
    engine = start(engine_recovery_timeout_sec=0.2)
    engine.add("x")
    error = RuntimeError("the device is lost")
    engine.fault(error)
    assert engine.end_of("x").finish_reason == "abort"
    engine.thread.join(5)
    assert engine.died_of is error
    engine.order("late", "retry")
    assert engine.answer("late").reason == "the engine is ending: no order came in time"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_an_exit_is_no_fault(start: Callable[..., Engine], error: BaseException) -> None:
    """Who wants the process to end gets that: nothing is caught, nobody is waited for."""
    engine = start()
    engine.core.fail = error
    engine.add("x")
    engine.thread.join(60)
    assert not engine.thread.is_alive()
    assert engine.died_of is error
    assert engine.states == ["healthy"] and engine.core.faults == 0


def test_worker_that_dies_while_nothing_runs(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.wait(lambda: engine.states)
    engine.core.worker_alive = False
    engine.core.on_end()
    engine.wait(lambda: engine.states[-1] == "dead")
    engine.core.on_end()  # told late: no second fault after the recovery
    engine.order("a", "respawn")
    assert engine.answer("a").success
    engine.add("x", tokens=3)
    assert engine.end_of("x").finish_reason == "length"
    engine.fault()
    engine.core.worker_alive = False  # while it stands still
    engine.core.on_end()
    engine.wait(lambda: engine.states[-1] == "dead")
    assert engine.core.faults == 2


def test_drain_finishes_what_runs_and_takes_nothing_new(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.add("x", tokens=60)
    engine.wait(lambda: engine.outputs("x"))
    engine.order("d", "drain")
    assert engine.answer("d").success and engine.states[-1] == "draining"
    engine.add("new")
    assert engine.end_of("new").stop_reason == UNAVAILABLE
    assert engine.end_of("x").finish_reason == "length"


def test_automatic_recovery_gives_up_when_nothing_helps(start: Callable[..., Engine]) -> None:
    engine = start(auto_recover="respawn")
    engine.add("x")
    engine.wait(lambda: engine.outputs("x"))
    engine.core.recover_error = OSError("the retry does not help")
    engine.fault()
    engine.wait(lambda: engine.states[-1] == "healthy")
    assert engine.core.recoveries == ["retry", "respawn"]
    for number in range(4):  # a request that kills the engine before its first token, again
        engine.wait(lambda: engine.states[-1] == "healthy")  # before it, a request is refused
        engine.core.fail = RuntimeError("again")
        engine.add(f"poison{number}")
        assert engine.end_of(f"poison{number}").finish_reason == "abort"
    time.sleep(0.6)
    assert engine.states[-1] == "unhealthy"
    assert engine.core.recoveries == ["retry", "respawn", "retry", "retry", "retry"]
