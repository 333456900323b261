"""Keeps an engine process alive when a step fails: ends its requests, says so, waits for an order,
carries it out, and lets the loop go on.

Two threads meet here, under one lock. The input thread hands over messages (`take`) and decides
about orders; the loop's thread runs the loop, and when that raises, parks and recovers. So a loop
that stands still never holds up an answer, and whoever takes the lock first wins a race.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

from jaxengine.engine.fault.outbox import Outbox
from jaxengine.engine.fault.state import (
    Event,
    Fault,
    Health,
    Order,
    Recovered,
    RecoveryFailed,
    State,
    Timeout,
    WorkerGone,
    advance,
)
from jaxengine.settings.fault import FaultSettings
from jaxengine.wire import frames as wire
from jaxengine.wire.messages import (
    UNAVAILABLE,
    EngineOutput,
    EngineStats,
    FaultToleranceRequest,
    FaultToleranceResult,
    RankStatus,
    UtilityCall,
    UtilityResult,
)

log = logging.getLogger(__name__)

CHECK = b"\xf0"  # inside the process: look whether the worker is gone
_LOOK = 0.25  # seconds between looks at `stopping` while parked
_MOST_IN_VAIN = 3  # automatic recoveries in a row without a token in between

_decode_order = msgspec.msgpack.Decoder(FaultToleranceRequest).decode


@runtime_checkable
class RecoverableCore(Protocol):
    """What the sentinel asks of a core. None of it waits for the worker, except the recoveries."""

    @property
    def worker_alive(self) -> bool: ...
    @property
    def epoch(self) -> int: ...
    def watch_worker(self, on_end: Callable[[], None]) -> None: ...
    def check_worker(self) -> None: ...
    def on_fault(self) -> None: ...
    def recover(self, respawn: bool) -> None: ...
    def stats(self) -> EngineStats: ...


class Group(Protocol):
    """The ranks that a rank fails together with (`engine.coupled.lockstep`)."""

    def bind(self, report: Callable[[wire.WaveNotice], None]) -> None: ...
    def start_wave(self, notice: wire.WaveNotice) -> None: ...
    def stop_waiting(self) -> None: ...
    def broke(self, port: int) -> None: ...
    def join(self, port: int) -> None: ...


@runtime_checkable
class GroupCore(Protocol):
    """A core that may be one rank of a `Group`."""

    @property
    def lockstep(self) -> Group | None: ...


def group_of(core: object) -> Group | None:
    return core.lockstep if isinstance(core, GroupCore) else None


class Sentinel:
    def __init__(
        self,
        core: RecoverableCore,
        settings: FaultSettings,
        outbox: Outbox,
        inbox: queue.SimpleQueue[tuple[bytes, Any]],
        stopping: threading.Event,
        rank: int,
    ) -> None:
        self._core = core
        self._settings = settings
        self._outbox = outbox
        self._inbox = inbox
        self._stopping = stopping
        self._rank = rank
        self._lock = threading.Condition()
        self._health = Health()
        self._order: FaultToleranceRequest | None = None  # accepted, to be carried out
        self._fatal: object = None  # of the input thread: nothing can be survived then
        self._fault_info: str | None = None
        self._in_vain = 0
        # Requests that the front still expects an end of. The core's own books may be what broke.
        self._open: set[str] = set()
        # Coupled ranks are recovered all at once, by the front.
        self._group = group_of(core)
        outbox.open_requests = self._open
        core.watch_worker(self._worker_gone)

    # -- the input thread -------------------------------------------------------------------

    def take(self, kind: bytes, body: Any) -> None:
        """A decoded message (an order: undecoded) on its way to the loop."""
        if kind == wire.ORDER:
            self._take_order(body)
            return
        if kind == wire.GROUP_BROKE:
            if self._group is not None:
                self._group.broke(body)
            return
        with self._lock:
            health = self._health
            if kind == wire.ADD and health.admits:
                self._open.add(body.request_id)
            elif kind == wire.ABORT:
                self._open.difference_update(body)
            elif kind == wire.FAILED:
                self._fatal = body
            refused = kind == wire.ADD and not health.admits
            refused |= kind == wire.UTILITY and health.parked
            if not refused and not (kind == wire.START_WAVE and health.parked):
                self._inbox.put((kind, body))
            if kind in (wire.SHUTDOWN, wire.FAILED):
                self._stop_waiting()
        if refused:
            self._refuse(kind, body)

    def _stop_waiting(self) -> None:
        if self._health.parked:
            self._stopping.set()
            self._lock.notify_all()

    def _refuse(self, kind: bytes, body: Any) -> None:
        reason = f"the engine is {self._health.state}"
        if kind == wire.ADD:
            self._outbox.publish([_refusal(body.request_id, reason)], None)
        elif kind == wire.UTILITY:
            call: UtilityCall = body
            self._outbox.send(wire.RESULT, UtilityResult(call_id=call.call_id, error=reason))

    def _take_order(self, payload: bytes) -> None:
        try:
            order = _decode_order(payload)
        except msgspec.MsgspecError as error:
            self._answer(_request_id(payload), f"the order cannot be read: {error}")
            return
        wrong = self._wrong_params(order)
        if wrong:
            self._answer(order.request_id, wrong)
            return
        with self._lock:
            reason = self._advance(Order(order.instruction))
            if not reason and self._health.recovering:
                self._order = order
                self._lock.notify_all()
                return  # answered when it has been carried out
        self._answer(order.request_id, reason)

    def _wrong_params(self, order: FaultToleranceRequest) -> str:
        """Why an order cannot be carried out as it stands; "" when it can. A coupled rank is told
        the port of its new group."""
        names = sorted(order.params)
        if self._group is not None and order.instruction in ("retry", "respawn"):
            if order.instruction == "respawn" and names == ["port"]:
                return ""
            return "ranks that share experts are respawned together, by the front"
        return f"params: {order.instruction} has no {names[0]!r}" if names else ""

    def _worker_gone(self) -> None:
        """In the executor's own thread."""
        with self._lock:
            self._inbox.put((CHECK, None))
            self._advance(WorkerGone())

    # -- the loop's thread ------------------------------------------------------------------

    def run(self, loop: Callable[[], None]) -> None:
        """Run the loop, again after every recovery. Raises its exception when nobody ordered a
        recovery in time."""
        self._push_status()
        while True:
            try:
                loop()
                return
            except Exception as error:  # what a step raises is survived, whatever it is
                if error is self._fatal:
                    raise
                self._end_requests(error)
                recovered = self._wait_for_recovery()
                if recovered is None:
                    raise
            if not recovered:
                if isinstance(self._fatal, Exception):
                    raise self._fatal
                return

    def _end_requests(self, error: Exception) -> None:
        """Clients first: nothing here waits for the device."""
        log.error("a step failed", exc_info=error)
        alive = self._core.worker_alive
        with self._lock:
            self._fault_info = str(getattr(error, "kind", type(error).__name__))
            self._advance(Fault(alive))  # from here on nothing new comes in
            held = self._drain_inbox()
            ended = sorted(self._open)
            self._open.clear()
        # The status came before: a router that replays a request must not choose this rank.
        outputs = [EngineOutput(i, [], finish_reason="abort") for i in ended]
        self._outbox.publish(outputs, None)
        for kind, body in held:
            if kind == wire.UTILITY:
                self._refuse(kind, body)
        self._core.on_fault()
        self._outbox.publish([], self._core.stats())

    def _drain_inbox(self) -> list[tuple[bytes, Any]]:
        """Requests and aborts in there are ended with all others; what ends the process stays."""
        held = []
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            held.append(message)
            if message[0] in (wire.SHUTDOWN, wire.FAILED):
                self._stopping.set()
        return held

    def _wait_for_recovery(self) -> bool | None:
        """True: go on. False: the process was told to stop. None: no order came in time."""
        deadline = time.monotonic() + self._settings.engine_recovery_timeout_sec
        self._in_vain = 0 if self._outbox.made_progress else self._in_vain + 1
        self._outbox.made_progress = False
        tried: set[str] = set()
        while True:
            with self._lock:
                self._order_automatically(tried)
                while self._order is None and not self._stopping.is_set():
                    left = deadline - time.monotonic()
                    if left <= 0 and not self._advance(Timeout()):
                        log.error("no order came in time; the engine ends")
                        return None
                    self._lock.wait(min(left, _LOOK))
                order, self._order = self._order, None
            if self._stopping.is_set():
                return False
            assert order is not None
            tried.add(order.instruction)
            if self._carry_out(order):
                return True

    def _order_automatically(self, tried: set[str]) -> None:
        """Each instruction once for a fault; what does not help waits for a person."""
        mode = self._settings.auto_recover
        if (
            mode == "never"
            or self._group is not None
            or self._order is not None
            or self._in_vain > _MOST_IN_VAIN
        ):
            return
        if "retry" not in tried and self._health.state is State.UNHEALTHY:
            instruction = "retry"
        elif "respawn" not in tried and mode == "respawn":
            instruction = "respawn"
        else:
            return
        if not self._advance(Order(instruction)):
            self._order = FaultToleranceRequest(request_id="", instruction=instruction)

    def _carry_out(self, order: FaultToleranceRequest) -> bool:
        began = time.monotonic()
        reason = ""
        event: Event = Recovered()
        try:
            if self._group is not None:
                self._group.join(int(order.params["port"]))
            self._core.recover(respawn=order.instruction == "respawn")
        except Exception as error:  # noqa: BLE001 - told to the controller, who may try again
            log.exception("%s failed", order.instruction)
            event = RecoveryFailed(self._core.worker_alive)
            reason = f"{order.instruction} failed: {getattr(error, 'kind', type(error).__name__)}"
        with self._lock:
            if not reason:
                self._fault_info = None
            self._advance(event)
        if not reason:
            log.warning("%s done in %.2f s", order.instruction, time.monotonic() - began)
        if order.request_id:
            self._answer(order.request_id, reason)
        return not reason

    # -- both -------------------------------------------------------------------------------

    def _advance(self, event: Event) -> str:
        """Under the lock. Returns why nothing happened, "" when something did; pushes changes."""
        before = self._health
        self._health, reason = advance(before, event)
        if self._health.state is not before.state:
            self._push_status()
        return reason

    def _push_status(self) -> None:
        status = RankStatus(
            rank=self._rank,
            state=self._health.state.value,
            epoch=self._core.epoch,
            fault_info=self._fault_info,
            since=time.time(),
        )
        log.info("the engine is %s", status.state)
        self._outbox.send(wire.STATUS, status)

    def _answer(self, request_id: str, reason: str) -> None:
        result = FaultToleranceResult(
            request_id=request_id, rank=self._rank, success=not reason, reason=reason
        )
        self._outbox.send(wire.ORDER_RESULT, result)


def refuse_order(outbox: Outbox, payload: bytes, rank: int) -> None:
    """The answer of an engine without a sentinel."""
    reason = "fault tolerance is off (--enable-fault-tolerance)"
    result = FaultToleranceResult(_request_id(payload), rank, success=False, reason=reason)
    outbox.send(wire.ORDER_RESULT, result)


def _refusal(request_id: str, reason: str) -> EngineOutput:
    return EngineOutput(
        request_id, [], finish_reason="error", stop_reason=UNAVAILABLE, error=reason
    )


def _request_id(payload: bytes) -> str:
    """Of an order that may be malformed otherwise."""
    try:
        found = msgspec.msgpack.decode(payload)
    except msgspec.MsgspecError:
        return ""
    return str(found.get("request_id", "")) if isinstance(found, dict) else ""
