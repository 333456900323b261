"""In the worker process: tells the engine which programs are compiled, at every change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxengine.executor.worker_messages import Programs

if TYPE_CHECKING:
    from jaxengine.engine.build import Built

_POLL = 0.1, 2.0  # seconds between looks at what is compiled: while it changes, and at most


class ProgramWatch:
    """Tells the engine which programs are compiled, at every change."""

    def __init__(self, built: Built, send: Callable[[Programs], None]) -> None:
        from jaxengine.executor.worker_build import row_sizes_of
        from jaxengine.runner.buckets import in_halves
        from jaxengine.runner.programs import Key
        from jaxengine.runner.warmup import warmup_keys

        self._executor = built.executor
        self._programs = built.runner.programs
        self._tell = send
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
                self._tell(Programs([(k.kind, k.size) for k in ready], figures))

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
