"""The worker process: owns the device, runs the batches that the engine process sends.

Three threads beside the compilers': one reads messages, the main one carries them out, one waits
for results. A step that raises makes everything after it void until the engine asks for a reset.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import threading
import traceback
from typing import TYPE_CHECKING, Any

from jaxengine import platform
from jaxengine.engine.fault.inject import Fault, carry_out
from jaxengine.executor.parent import tie_to_parent
from jaxengine.executor.worker_messages import (
    Answer,
    Call,
    Channel,
    Command,
    Compile,
    Programs,
    Sample,
    Start,
    StartFailed,
    StepDone,
    StepFailed,
    Stop,
    Submit,
    WireResult,
)

if TYPE_CHECKING:
    from jaxengine.engine.build import Built

log = logging.getLogger(__name__)

_POLL = 0.1, 2.0  # seconds between looks at what is compiled: while it changes, and at most


def main(file_descriptor: int) -> None:
    """Entry of the process; the descriptor is its end of the socket pair. Never returns."""
    sock = socket.socket(fileno=file_descriptor)
    os.set_inheritable(file_descriptor, False)
    channel: Channel[Command] = Channel(sock, Command)
    start = channel.receive()
    assert isinstance(start, Start)
    tie_to_parent(start.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    _setup_logging(start)
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), daemon=True).start()
    platform.setup()
    try:
        # JAX must not be imported before platform.setup().
        from jaxengine.engine.build import build
        from jaxengine.executor.worker_build import describe

        built = build(start.config)
    except Exception as error:  # noqa: BLE001 - the engine must learn of it, whatever it is
        user_error = isinstance(error, (ValueError, FileNotFoundError))
        name = type(error).__name__
        message = _one_line(error) if user_error else f"{name}: {_one_line(error)}"
        trace = "".join(traceback.format_exception(error))
        channel.send(StartFailed(message, trace, user_error))
        os._exit(1)
    channel.send(describe(built))
    gc.collect()
    gc.freeze()
    _Worker(built, channel).run(inbox)
    os._exit(0)  # device runtimes keep threads that would hold a normal exit back


def _read(channel: Channel[Command], inbox: queue.SimpleQueue[Command]) -> None:
    while True:
        try:
            inbox.put(channel.receive())
        except EOFError:  # the engine is gone
            os._exit(1)


def _setup_logging(start: Start) -> None:
    import setproctitle

    setproctitle.setproctitle(f"jaxengine::worker of {start.parent_pid}")
    logging.basicConfig(
        level=start.config.server.log_level.upper(),
        format="%(asctime)s %(levelname).1s worker %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


class _Worker:
    def __init__(self, built: Built, channel: Channel[Command]) -> None:
        self._executor = built.executor
        self._channel = channel
        self._handles: dict[int, Any] = {}  # submitted, not sampled yet
        self._sampled: queue.Queue[tuple[int, Any]] = queue.Queue()
        # The first step that failed: it and all after it are void until the reset.
        self._failed: int | None = None
        self._lock = threading.Lock()
        self._programs = _ProgramWatch(built, channel)

    def run(self, inbox: queue.SimpleQueue[Command]) -> None:
        threading.Thread(target=self._send_results, daemon=True).start()
        while True:
            message = inbox.get()
            match message:
                case Submit():
                    self._step(message.step, lambda m=message: self._submit(m))
                case Sample():
                    self._step(message.step, lambda m=message: self._sample(m))
                case Call():
                    self._call(message)
                case Compile():
                    self._programs.start(message.key)
                case Stop():
                    self._executor.shutdown()
                    return
                case Start():
                    raise AssertionError("started twice")

    def _step(self, step: int, action: Any) -> None:
        if self._is_void(step):
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the engine learns of it and decides
            self._fail(step, error)
        self._programs.look()

    def _submit(self, message: Submit) -> None:
        batch = message.batch.batch()
        fault = message.fault
        if fault is not None and fault.kind != "oom":
            carry_out(fault)
        handle = self._executor.submit(batch)
        if fault is not None and fault.kind == "oom":
            carry_out(fault)  # halfway: the KV is written, the result is lost
        if batch.masked:
            self._handles[message.step] = handle
        else:
            self._sampled.put((message.step, handle))

    def _sample(self, message: Sample) -> None:
        handle = self._handles.pop(message.step)
        self._executor.sample(handle, message.mask.numpy())
        self._sampled.put((message.step, handle))

    def _send_results(self) -> None:
        while True:
            step, handle = self._sampled.get()
            if not self._is_void(step):  # those before it still count
                try:
                    results = self._executor.result(handle)
                    self._channel.send(StepDone(step, [WireResult.of(r) for r in results]))
                except Exception as error:  # noqa: BLE001 - the engine learns of it and decides
                    self._fail(step, error)
            del handle
            self._sampled.task_done()

    def _is_void(self, step: int) -> bool:
        return self._failed is not None and step >= self._failed

    def _fail(self, step: int, error: Exception) -> None:
        with self._lock:  # both threads may find one
            if self._is_void(step):
                return
            self._failed = step
        log.error("step %d failed", step, exc_info=error)
        self._channel.send(StepFailed(step, type(error).__name__, _one_line(error)))

    def _call(self, message: Call) -> None:
        answer = Answer(message.call)
        try:
            self._run_call(message.method, message.args, message.fault)
        except Exception as error:  # noqa: BLE001 - the engine learns of it and decides
            log.exception("%s failed", message.method)
            answer = Answer(message.call, type(error).__name__, _one_line(error))
        self._programs.send()
        self._channel.send(answer)

    def _run_call(self, method: str, args: list[int], fault: Fault | None) -> None:
        if fault is not None:
            carry_out(fault)
        if method == "reset":
            self._failed = 0
            self._sampled.join()  # nothing may still use what is rebuilt
            self._handles.clear()
            self._executor.reset()
            self._failed = None
        elif method == "sleep":
            self._executor.sleep(*args)
        elif method == "wake_up":
            self._executor.wake_up()
        elif method == "wait_warm":
            self._executor.wait_warm()
        else:
            raise ValueError(f"unknown call {method!r}")


class _ProgramWatch:
    """Tells the engine which programs are compiled, at every change."""

    def __init__(self, built: Built, channel: Channel[Command]) -> None:
        from jaxengine.executor.worker_build import row_sizes_of
        from jaxengine.runner.buckets import in_halves
        from jaxengine.runner.programs import Key
        from jaxengine.runner.warmup import warmup_keys

        self._executor = built.executor
        self._programs = built.runner.programs
        self._channel = channel
        self._key = Key
        buckets = built.runner.buckets
        halves = in_halves(buckets, built.overlap)
        self._keys = warmup_keys(buckets, row_sizes_of(built.planner), halves)
        self._sent: tuple[int, dict[str, float]] = (-1, {})
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self.send()
        threading.Thread(target=self._poll, daemon=True).start()

    def start(self, key: tuple[str, Any]) -> None:
        self._programs.start([self._key(*key)])  # type: ignore[arg-type]
        self._changed.set()

    def look(self) -> None:
        """Something may have been compiled; cheap when not."""
        if self._programs.num_compiled != self._sent[1].get("num_compilations"):
            self._changed.set()
            self.send()

    def send(self) -> None:
        with self._lock:
            ready = [key for key in self._keys if self._programs.ready(key)]
            figures = self._executor.stats()
            now = (len(ready), figures)
            if now != self._sent:
                self._sent = now
                self._channel.send(Programs([(k.kind, k.size) for k in ready], figures))

    def _poll(self) -> None:
        """The compilers work beside; look often while they get on, else ever more rarely."""
        wait = _POLL[0]
        while True:
            before = self._sent
            self.send()
            wait = _POLL[0] if self._sent != before else min(2 * wait, _POLL[1])
            everything = self._sent[0] == len(self._keys)
            if self._changed.wait(None if everything else wait):
                self._changed.clear()
                wait = _POLL[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
