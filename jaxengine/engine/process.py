"""The engine process: owns a core, reads messages, steps, publishes. Runs until told to stop,
until its parent is gone, or until a step fails (and, with fault tolerance, nobody helps)."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import zmq

from jaxengine import garbage
from jaxengine.config import EngineConfig
from jaxengine.engine.crash_note import note_crash
from jaxengine.engine.fault.outbox import Outbox
from jaxengine.engine.fault.sentinel import (
    CHECK,
    Group,
    RecoverableCore,
    Sentinel,
    group_of,
    refuse_order,
)
from jaxengine.executor.parent import tie_to_parent
from jaxengine.settings.fault import fault_settings
from jaxengine.settings.faults import for_rank
from jaxengine.wire import frames as wire
from jaxengine.wire.messages import (
    INVALID_REQUEST,
    EngineOutput,
    EngineReady,
    EngineRequest,
    EngineStats,
    UtilityCall,
    UtilityResult,
)

log = logging.getLogger(__name__)

STATS_INTERVAL = 0.25  # seconds between stats while working; one more follows when work ends
_PARENT_CHECK_MS = 500


class Core(Protocol):
    """What an engine process runs: `engine.core.EngineCore` or `engine.stub.StubEngineCore`."""

    def ready(self) -> EngineReady: ...
    def add_request(self, request: EngineRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[EngineOutput]: ...
    def stats(self) -> EngineStats: ...
    def utility(self, method: str, args: list[Any]) -> Any: ...
    def shutdown(self) -> None: ...


@runtime_checkable
class EarlyCore(Protocol):
    """A core that ends requests while a step runs."""

    def abort_early(
        self, request_ids: list[str], report: Callable[[EngineStats], None]
    ) -> None: ...


@dataclass(frozen=True)
class EngineLaunch:
    """What a spawned engine process is told. `die_with_parent` needs the parent's main thread:
    the kernel's death signal follows the thread that spawned the child."""

    config: EngineConfig
    input_address: str
    output_address: str
    core: str = wire.DEFAULT_CORE
    index: int = 0
    parent_pid: int = 0
    die_with_parent: bool = True


def run_engine(launch: EngineLaunch) -> None:
    """Entry of the child process. Exits 0 after SHUTDOWN or SIGTERM, 1 after a failure."""
    garbage.pause()
    tie_to_parent(launch.parent_pid, launch.die_with_parent)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the whole group; the front decides
    stopping = threading.Event()
    inbox: queue.SimpleQueue[tuple[bytes, Any]] = queue.SimpleQueue()

    def on_terminate(*_: object) -> None:
        stopping.set()
        if group := group_of(core):
            group.stop_waiting()
        inbox.put((wire.SHUTDOWN, None))

    setup_child_logging(launch.config, f"engine{launch.index}")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outputs = context.socket(zmq.PUSH)
    outputs.setsockopt(zmq.LINGER, 4000)  # a last FAILED message still gets out
    outputs.setsockopt(zmq.SNDHWM, 0)
    outputs.connect(launch.output_address)
    outbox = Outbox(outputs, launch.index)
    code = 0
    core: Core | None = None
    try:
        core = _make_core(launch)
        signal.signal(signal.SIGTERM, on_terminate)  # until here, SIGTERM simply ends the process
        ready = core.ready()
        ready.engine_index = launch.index
        sentinel = None
        if launch.config.fault.enable_fault_tolerance and isinstance(core, RecoverableCore):
            settings = fault_settings(launch.config.fault)
            sentinel = Sentinel(core, settings, outbox, inbox, stopping, launch.index)
        deliver = sentinel.take if sentinel else _plain_delivery(inbox, outbox, launch.index)
        if group := group_of(core):
            group.bind(functools.partial(outbox.send, wire.WAVE))
            deliver = _stopping_at_once(deliver, group)
            if sentinel is None and isinstance(core, RecoverableCore):
                core.watch_worker(lambda: inbox.put((CHECK, None)))
        if isinstance(core, EarlyCore):
            deliver = _aborting_at_once(deliver, core, outbox)
        deliver = _answering_pings(deliver, outbox)
        reader = threading.Thread(
            target=_read_input, args=(context, launch, deliver, stopping), daemon=True
        )
        reader.start()
        outbox.send(wire.READY, ready)
        garbage.settle(one_answer=launch.config.runner.warmup in ("first", "greedy"))
        loop = functools.partial(_busy_loop, core, inbox, outbox, stopping)
        if sentinel:
            sentinel.run(loop)
        else:
            loop()
    except Exception as error:  # noqa: BLE001 - the front must learn of it, whatever it is
        code = 1
        failure = _failure(error)
        if not failure.user_error:
            note_crash(error, f"engine {launch.index}")
        outbox.send(wire.FAILED, failure)
    finally:
        stopping.set()
        if core is not None:
            core.shutdown()
        outputs.close()
        sys.stdout.flush()
        sys.stderr.flush()
        context.destroy(linger=4000)
    os._exit(code)  # device runtimes keep threads that would hold a normal exit back


def setup_child_logging(config: EngineConfig, name: str) -> None:
    """Log to stderr with the process's name, and show it in ps."""
    import setproctitle

    setproctitle.setproctitle(f"jaxengine::{name}")
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format=f"%(asctime)s %(levelname).1s {name} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


def _make_core(launch: EngineLaunch) -> Core:
    from jaxengine.platform import setup

    setup(launch.config.parallel)
    module, _, name = launch.core.partition(":")
    config = for_rank(launch.config, launch.index)
    core: Core = getattr(importlib.import_module(module), name)(config)
    return core


def _plain_delivery(
    inbox: queue.SimpleQueue[tuple[bytes, Any]], outbox: Outbox, rank: int
) -> Callable[[bytes, Any], None]:
    """Messages on their way to the loop, without a sentinel."""

    def deliver(kind: bytes, body: Any) -> None:
        if kind == wire.ORDER:
            refuse_order(outbox, body, rank)
        else:
            inbox.put((kind, body))

    return deliver


def _stopping_at_once(
    deliver: Callable[[bytes, Any], None], group: Group
) -> Callable[[bytes, Any], None]:
    """The same, when the loop may be waiting for other ranks."""

    def at_once(kind: bytes, body: Any) -> None:
        deliver(kind, body)
        if kind in (wire.SHUTDOWN, wire.FAILED):
            group.stop_waiting()

    return at_once


def _aborting_at_once(
    deliver: Callable[[bytes, Any], None], core: EarlyCore, outbox: Outbox
) -> Callable[[bytes, Any], None]:
    """The same, with aborts carried out here and not after the step that runs. The loop gets them
    too: the request may be in its inbox still."""

    def at_once(kind: bytes, body: Any) -> None:
        if kind == wire.ABORT:
            core.abort_early(body, lambda stats: outbox.publish([], stats))
        deliver(kind, body)

    return at_once


def _answering_pings(
    deliver: Callable[[bytes, Any], None], outbox: Outbox
) -> Callable[[bytes, Any], None]:
    """The same, with signs of life given here: the loop may be in a step that compiles."""

    def answer(kind: bytes, body: Any) -> None:
        if kind == wire.PING:
            outbox.send(wire.PONG, None)
        else:
            deliver(kind, body)

    return answer


def _failure(error: Exception) -> wire.EngineFailure:
    text = " ".join(str(error).split()) or "no message"
    user_error = isinstance(error, (ValueError, FileNotFoundError))
    message = text if user_error else f"{type(error).__name__}: {text}"
    trace = "".join(traceback.format_exception(error))
    return wire.EngineFailure(message=message, traceback=trace, user_error=user_error)


def _read_input(
    context: zmq.Context[zmq.Socket[bytes]],
    launch: EngineLaunch,
    deliver: Callable[[bytes, Any], None],
    stopping: threading.Event,
) -> None:
    """Input thread: decode while a step runs, and watch the parent."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, launch.index.to_bytes(2, "little"))
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(launch.input_address)
    socket.send(b"")  # lets the front's ROUTER know this identity
    decoders: dict[bytes, Callable[[bytes], Any]] = {
        wire.ABORT: wire.decode_ids,
        wire.UTILITY: wire.decode_call,
        wire.START_WAVE: wire.decode_wave,
        wire.GROUP_BROKE: wire.decode_port,
        wire.ORDER: bytes,  # a malformed one is answered, not died of
    }
    try:
        while not stopping.is_set():
            if not socket.poll(_PARENT_CHECK_MS):
                if os.getppid() != launch.parent_pid:
                    os._exit(1)
                continue
            kind, payload = socket.recv_multipart()
            if kind == wire.ADD:
                for request in wire.decode_siblings(payload).requests():
                    deliver(kind, request)
                continue
            decode = decoders.get(kind)
            deliver(kind, decode(payload) if decode else None)
    except Exception as error:  # noqa: BLE001 - handed to the main loop, which dies of it
        deliver(wire.FAILED, error)
    finally:
        socket.close()


def _busy_loop(
    core: Core,
    inbox: queue.SimpleQueue[tuple[bytes, Any]],
    outbox: Outbox,
    stopping: threading.Event,
) -> None:
    last_stats = 0.0
    was_busy = False
    while True:
        published: list[EngineOutput] = []
        while True:  # take messages; block only when idle
            busy = core.has_work()
            if not busy and was_busy:  # gauges fall to 0 before the engine goes to sleep
                outbox.publish(published, core.stats())
                published, was_busy = [], False
            try:
                kind, body = inbox.get(block=not busy and not published)
            except queue.Empty:
                break
            was_busy = True
            if kind == wire.SHUTDOWN:
                return
            if kind == wire.FAILED:
                raise body
            _handle(core, kind, body, published, outbox)
        if stopping.is_set():
            return
        if core.has_work():
            published += core.step()
        now = time.monotonic()
        stats = core.stats() if now - last_stats >= STATS_INTERVAL else None
        if stats is not None:
            last_stats = now
        if published or stats is not None:
            outbox.publish(published, stats)


def _handle(
    core: Core, kind: bytes, body: Any, published: list[EngineOutput], outbox: Outbox
) -> None:
    if kind == wire.ADD:
        request: EngineRequest = body
        try:
            core.add_request(request)
        except Exception as error:  # noqa: BLE001 - one bad request ends alone
            refused = isinstance(error, ValueError)
            if not refused:
                log.exception("request %s could not be added", request.request_id)
            published.append(
                EngineOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason="error",
                    stop_reason=INVALID_REQUEST if refused else None,
                    error=str(error),
                )
            )
    elif kind == wire.ABORT:
        core.abort_requests(body)
    elif kind == wire.UTILITY:
        call: UtilityCall = body
        try:
            result = UtilityResult(
                call_id=call.call_id, result=core.utility(call.method, call.args)
            )
        except Exception as error:  # noqa: BLE001 - told to the caller, the engine lives on
            log.exception("engine call %s failed", call.method)
            result = UtilityResult(call_id=call.call_id, error=f"{type(error).__name__}: {error}")
        outbox.send(wire.RESULT, result)
    elif kind == wire.START_WAVE and (group := group_of(core)):
        group.start_wave(body)
    elif kind == CHECK and isinstance(core, RecoverableCore):
        core.check_worker()
