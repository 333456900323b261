"""The worker process: owns the device, runs the batches that the engine process sends.

Three threads besides the compilers': one reads messages, the main one carries them out, one waits
for results. A step that raises makes everything after it void until the engine asks for a reset.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxengine import garbage, platform
from jaxengine.executor.inject import carry_out
from jaxengine.executor.parent import tie_to_parent
from jaxengine.executor.program_watch import ProgramWatch
from jaxengine.executor.worker_messages import (
    Alive,
    Answer,
    Call,
    Channel,
    Command,
    Compile,
    OpenSpeculation,
    OpenTransfers,
    Sample,
    Start,
    Started,
    StartFailed,
    StepDone,
    StepFailed,
    Stop,
    Submit,
    Transfer,
    TransfersDone,
)
from jaxengine.sched.executor import Verifier

if TYPE_CHECKING:
    from jaxengine.executor.nodes import LeadingExecutor
    from jaxengine.runner.model_runner import ModelRunner
    from jaxengine.sched.shapes import StepShapes

log = logging.getLogger(__name__)

_TRANSFER_POLL = 0.001  # seconds between looks at KV transfers under way
HEARTBEAT = 1.0  # seconds


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
    garbage.pause()
    _setup_logging(start)
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), daemon=True).start()
    platform.setup(start.config.parallel)
    try:
        # JAX must not be imported before platform.setup().
        from jaxengine.executor.build import build

        executor, facts = build(start.config)
    except Exception as error:  # noqa: BLE001 - the engine must learn of it, whatever it is
        user_error = isinstance(error, (ValueError, FileNotFoundError))
        name = type(error).__name__
        message = _one_line(error) if user_error else f"{name}: {_one_line(error)}"
        trace = "".join(traceback.format_exception(error))
        channel.send(StartFailed(message, trace, user_error))
        os._exit(1)
    channel.send(Started(facts))
    threading.Thread(target=_beat, args=(channel,), daemon=True).start()
    garbage.settle(one_answer=start.config.runner.warmup in ("first", "greedy"))
    _Worker(executor, facts.step_shapes, channel).run(inbox)
    os._exit(0)  # device runtimes keep threads that would hold a normal exit back


def _read(channel: Channel[Command], inbox: queue.SimpleQueue[Command]) -> None:
    while True:
        try:
            inbox.put(channel.receive())
        except EOFError:  # the engine is gone
            os._exit(1)


def _beat(channel: Channel[Command]) -> None:
    """A step whose program is being compiled may take minutes; a process that is stopped is told
    from one that compiles by its silence."""
    while True:
        time.sleep(HEARTBEAT)
        channel.send(Alive())


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
    def __init__(
        self,
        executor: ModelRunner | LeadingExecutor,
        step_shapes: StepShapes,
        channel: Channel[Command],
    ) -> None:
        self._executor = executor
        self._channel = channel
        self._handles: dict[int, Any] = {}  # submitted, not sampled yet
        self._sampled: queue.Queue[tuple[int, Any]] = queue.Queue()
        # The first step that failed: it and all after it are void until the reset.
        self._failed: int | None = None
        self._lock = threading.Lock()
        self._moving = 0  # KV transfers under way
        self._programs = ProgramWatch(executor, step_shapes, channel.send)

    def run(self, inbox: queue.SimpleQueue[Command]) -> None:
        threading.Thread(target=self._send_results, daemon=True).start()
        while True:
            try:
                message = inbox.get(timeout=_TRANSFER_POLL if self._moving else None)
            except queue.Empty:
                self._poll_transfers()
                continue
            match message:
                case Submit():
                    self._step(message.step, partial(self._submit, message))
                case Sample():
                    self._step(message.step, partial(self._sample, message))
                case Transfer():
                    self._step(message.step, partial(self._transfer, message))
                case OpenSpeculation():
                    self._answer(message.call, partial(self._open_speculation, message))
                case OpenTransfers():
                    self._answer(message.call, partial(self._open_transfers, message))
                case Call():
                    self._answer(message.call, partial(self._call, message))
                case Compile():
                    self._programs.start(message.key)
                case Stop():
                    self._executor.shutdown()
                    return
                case Start():
                    raise AssertionError("started twice")
            if self._moving:
                self._poll_transfers()

    def _step(self, step: int, action: Callable[[], None]) -> None:
        if self._is_void(step):
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the engine learns of it and decides
            self._fail(step, error)
        self._programs.look()

    def _submit(self, message: Submit) -> None:
        batch = message.batch
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
        self._executor.sample(handle, message.mask)
        self._sampled.put((message.step, handle))

    def _send_results(self) -> None:
        while True:
            step, handle = self._sampled.get()
            if not self._is_void(step):  # those before it still count
                try:
                    results = self._executor.result(handle)
                    self._channel.send(StepDone(step, results))
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

    def _transfer(self, message: Transfer) -> None:
        steps = [step for step in message.shards if step is not None]
        self._executor.transfer(message.shards)
        self._moving += sum(len(step.stores) + len(step.loads) for step in steps)

    def _poll_transfers(self) -> None:
        done = self._executor.poll_transfers()
        count = sum(map(len, done))
        if count:
            self._moving -= count
            self._channel.send(TransfersDone(done))

    def _open_transfers(self, message: OpenTransfers) -> None:
        from jaxengine.offload.host_pool import PagePool

        pools = [PagePool.attach(p.address, p.num_slots, p.page_bytes) for p in message.pools]
        self._executor.open_transfers(pools, message.layout)

    def _open_speculation(self, message: OpenSpeculation) -> None:
        self._programs.watch_drafts(message.shapes)
        assert isinstance(self._executor, Verifier)
        self._executor.open_speculation(message.shapes, message.lookup, message.warmup)

    def _answer(self, call: int, action: Callable[[], None]) -> None:
        answer = Answer(call)
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the engine learns of it and decides
            log.exception("a call failed")
            answer = Answer(call, type(error).__name__, _one_line(error))
        self._programs.send()
        self._channel.send(answer)

    def _call(self, message: Call) -> None:
        method, args = message.method, message.args
        if message.fault is not None:
            carry_out(message.fault)
        if method == "reset":
            self._failed = 0
            self._sampled.join()  # nothing may still use what is rebuilt
            self._handles.clear()
            self._executor.reset()
            self._moving = 0
            self._failed = None
        elif method == "sleep":
            self._executor.sleep(*args)
            self._moving = 0
        elif method == "wake_up":
            self._executor.wake_up(*map(bool, args))
        elif method == "wait_warm":
            self._executor.wait_warm()
        else:
            raise ValueError(f"unknown call {method!r}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
