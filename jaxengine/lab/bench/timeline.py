"""Who did what when: host and device over the steps of an engine in this process, to be drawn."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxengine.engine.core import EngineCore
from jaxengine.lab.tap import tapped
from jaxengine.sched.executor import Batch
from jaxengine.wire.messages import EngineRequest

Lane = Literal["plan", "dispatch", "wait", "output", "device"]


@dataclass(frozen=True)
class Span:
    """Seconds from the start of the trace. Steps are numbered as they were submitted; `plan` and
    `output` are the host's Python before a dispatch and after a result. `device` begins when the
    step was dispatched, or the step before it was done, whichever came later."""

    lane: Lane
    step: int
    begin: float
    end: float
    tokens: int  # of the step's compiled shape


def trace(core: EngineCore, requests: Sequence[EngineRequest]) -> list[Span]:
    """Run the requests to their end and note every step. Only what runs here pays for it.

    A thread waits for every step's output, because the host may look at it much later. Raises
    RuntimeError with the message of a request that failed.
    """
    recorder = _Recorder()
    try:
        with tapped(core.executor, submit=recorder.submit, result=recorder.result):
            for request in requests:
                core.add_request(request)
            while core.has_work():
                recorder.turn_began = time.perf_counter()
                for output in core.step():
                    if output.error:
                        raise RuntimeError(output.error)
                recorder.turn_ended()
    finally:
        recorder.close()
    return sorted(recorder.spans, key=lambda span: span.begin)


def busy(spans: Sequence[Span], lane: Lane, begin: float, end: float) -> float:
    """Share of the time from `begin` to `end` that the lane was at work."""
    covered = sum(max(0.0, min(s.end, end) - max(s.begin, begin)) for s in spans if s.lane == lane)
    return covered / (end - begin)


class _Recorder:
    """Notes what passes between a core and its executor. A thread of it runs until `close`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.turn_began = 0.0
        self._zero = time.perf_counter()
        self._count = 0
        self._steps: dict[int, tuple[int, int]] = {}  # id of the handle: step, tokens
        self._last: tuple[int, int, float] | None = None  # what this turn's result was, and when
        self._dispatched: queue.SimpleQueue[tuple[Any, int, int, float] | None] = (
            queue.SimpleQueue()
        )
        self._watcher = threading.Thread(target=self._watch, name="timeline", daemon=True)
        self._watcher.start()

    def _note(self, lane: Lane, step: int, tokens: int, begin: float, end: float) -> None:
        self.spans.append(Span(lane, step, begin - self._zero, end - self._zero, tokens))

    def submit(self, submit: Callable[[Batch], Any], batch: Batch) -> Any:
        began = time.perf_counter()
        handle = submit(batch)
        ended = time.perf_counter()
        step, tokens = self._count, batch.bucket.tokens
        self._count += 1
        self._steps[id(handle)] = step, tokens
        self._note("plan", step, tokens, self.turn_began, began)
        self._note("dispatch", step, tokens, began, ended)
        self.turn_began = ended
        self._dispatched.put((handle.rows, step, tokens, began))
        return handle

    def result(self, result: Callable[[Any], Any], handle: Any) -> Any:
        began = time.perf_counter()
        results = result(handle)
        ended = time.perf_counter()
        step, tokens = self._steps.pop(id(handle))
        self._note("wait", step, tokens, began, ended)
        self._last = step, tokens, ended
        return results

    def turn_ended(self) -> None:
        if self._last is not None:
            step, tokens, since = self._last
            self._note("output", step, tokens, since, time.perf_counter())
            self._last = None

    def _watch(self) -> None:
        done = 0.0
        while (item := self._dispatched.get()) is not None:
            rows, step, tokens, began = item
            jax.block_until_ready(rows)
            now = time.perf_counter()
            self._note("device", step, tokens, max(began, done), now)
            done = now

    def close(self) -> None:
        self._dispatched.put(None)
        self._watcher.join()
