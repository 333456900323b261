"""The engine's end of a worker process: start it, talk to it, notice when it ends. No JAX."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxengine.config import EngineConfig
from jaxengine.executor.worker_messages import Channel, Reply, Start

_GOODBYE = 5.0  # seconds that a process gets to end


class WorkerDied(RuntimeError):
    """The worker process is gone, and the device state with it."""


class WorkerHung(WorkerDied):
    """The worker process was killed, because a step took too long."""


class PeerFailed(WorkerDied):
    """The worker process was killed, because its group broke: a rank that shares its experts
    failed."""


class WorkerError(RuntimeError):
    """The worker raised and lives on. `kind` is the class of its exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind


class WorkerProcess:
    """One worker process. Its end is told once, unless it was asked for."""

    def __init__(
        self,
        config: EngineConfig,
        receive: Callable[[Reply], None],
        ended: Callable[[WorkerDied], None],
        send_timeout: float,
    ) -> None:
        """`receive` and `ended` are called in a thread of their own. `send_timeout`: seconds after
        which a process that reads nothing counts as hung."""
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            code = f"from jaxengine.executor.worker_main import main; main({number})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        timeout = struct.pack("@ll", int(send_timeout), int(send_timeout % 1 * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._socket = ours
        self._channel: Channel[Reply] = Channel(ours, Reply)
        self._receive = receive
        self._ended = ended
        self._closed = False
        self._why: WorkerDied | None = None
        self._reader = threading.Thread(target=self._read, name="worker-reader", daemon=True)
        self.send(Start(config, os.getpid()))
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: msgspec.Struct) -> None:
        """Raises WorkerDied; a worker that does not read is killed."""
        try:
            self._channel.send(message)
        except BlockingIOError:
            self.hung("it reads no messages")
            raise self._reason() from None
        except OSError:
            raise self._reason() from None

    def hung(self, what: str) -> None:
        """Kill it for taking too long."""
        self._why = WorkerHung(f"the worker process was killed: {what}")
        self._kill()

    def abandon(self, why: WorkerDied) -> None:
        """Kill it for a fault that is not its own."""
        self._why = self._why or why
        self._kill()

    def close(self, grace: float = 0.0) -> None:
        """End it: it has `grace` seconds to do so itself. Idempotent; waits until it is gone."""
        self._closed = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        self._kill()
        self._process.wait(_GOODBYE)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join(_GOODBYE)
        self._channel.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def _read(self) -> None:
        try:
            while True:
                self._receive(self._channel.receive())
        except EOFError:
            if not self._closed:
                self._ended(self._reason())
        except Exception as error:  # noqa: BLE001 - a message that makes no sense: same as death
            self._why = self._why or WorkerDied(f"the worker process sent nonsense: {error}")
            self._kill()
            self._ended(self._reason())

    def _reason(self) -> WorkerDied:
        if self._why is not None:
            return self._why
        try:
            code = self._process.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            self._kill()
            code = self._process.wait(_GOODBYE)
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name}"
        return WorkerDied(f"the worker process ended ({how})")


def _environment() -> dict[str, str]:
    """The worker must find this very package, wherever the parent found it."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
