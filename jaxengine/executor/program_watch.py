"""Part of the worker process that tells the engine which programs are compiled, at every change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxengine.executor.worker_messages import Programs
from jaxengine.sched.buckets import in_halves
from jaxengine.sched.shapes import ProgramKey, StepShapes
from jaxengine.sched.verify_batch import verify_bucket

if TYPE_CHECKING:
    from jaxengine.executor.nodes import LeadingExecutor
    from jaxengine.runner.model_runner import ModelRunner

_POLL = 0.1, 2.0  # seconds between looks at what is compiled: while it changes, and at most


class ProgramWatch:
    """Tells the engine which programs are compiled, at every change."""

    def __init__(
        self,
        executor: ModelRunner | LeadingExecutor,
        shapes: StepShapes,
        send: Callable[[Programs], None],
    ) -> None:
        from jaxengine.runner.warmup import warmup_keys  # imports JAX

        self._executor, self._overlap = executor, shapes.overlap
        self._tell = send
        self._plain: list[ProgramKey] = [(key.kind, key.size) for key in warmup_keys(shapes)]
        self._keys = self._plain
        # Compiled on demand only. Not to know of one would give its steps the time of a compile.
        self._greedy: list[ProgramKey] = [("greedy", rows) for rows in shapes.row_sizes]
        self._sent: tuple[int, int, dict[str, float]] = (-1, -1, {})
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self.send()
        threading.Thread(target=self._poll, daemon=True).start()

    def start(self, key: ProgramKey) -> None:
        self._executor.start(key)
        self._changed.set()

    def watch_drafts(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Steps with drafts too, of these (rows, drafts)."""
        buckets = [verify_bucket(*shape) for shape in shapes]
        buckets += in_halves(buckets, self._overlap)
        self._keys = self._plain + [("verify", bucket) for bucket in buckets]
        self._changed.set()

    def look(self) -> None:
        """Something may have been compiled; cheap when not."""
        if self._executor.stats()["num_compilations"] != self._sent[2].get("num_compilations"):
            self._changed.set()
            self.send()

    def send(self) -> None:
        with self._lock:
            ready = [key for key in self._keys if self._executor.ready(key)]
            greedy = [key for key in self._greedy if self._executor.ready(key)]
            figures = self._executor.stats()
            now = (len(ready), len(greedy), figures)
            if now != self._sent:
                self._sent = now
                self._tell(Programs(ready + greedy, figures))

    def _poll(self) -> None:
        """Look often while the compilers make progress, else more and more rarely."""
        wait = _POLL[0]
        while True:
            before = self._sent
            self.send()
            wait = _POLL[0] if self._sent != before else min(2 * wait, _POLL[1])
            everything = self._sent[0] == len(self._keys)
            if self._changed.wait(None if everything else wait):
                self._changed.clear()
                wait = _POLL[0]
