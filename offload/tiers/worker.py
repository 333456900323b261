"""The threads of a tier: what they are asked, and what they answered."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxengine.offload.counters import Counters
from jaxengine.offload.host_pool import Bytes
from jaxengine.offload.keys import OffloadKey
from jaxengine.offload.seldom import SeldomLog
from jaxengine.offload.tiers.base import BlockStore

log = logging.getLogger(__name__)

Kind = Literal["contains", "read", "write", "delete"]
BATCH = 16  # blocks of one read


@dataclass(frozen=True)
class TierResult:
    """Answer to the task with this token: one bool a key."""

    kind: Kind
    token: int
    keys: Sequence[OffloadKey]
    ok: list[bool]


Task = tuple[Kind, int, Sequence[OffloadKey], Callable[[], list[bool]]]


class TierWorker:
    """Bounded queues before a blocking store; reads and writes have threads of their own.

    Submitting never waits: a full queue refuses, and is counted. Results are polled. An exception
    of the store makes that one task fail; the thread lives on.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        counters: Counters,
        *,
        threads: int = 2,
        max_queue: int = 1024,
    ) -> None:
        self.name = name
        self.store = store
        self.writable = store.writable
        self._counters = counters
        self._seldom = SeldomLog(log)
        self._results: deque[TierResult] = deque()
        self._reads: queue.Queue[Task | None] = queue.Queue(max_queue)
        self._writes: queue.Queue[Task | None] = queue.Queue(max_queue)
        self._pending = 0  # only the caller's thread counts
        self._threads = [
            threading.Thread(target=self._run, args=(tasks,), name=f"kv-{name}", daemon=True)
            for tasks in (self._reads, self._writes)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, token: int, keys: Sequence[OffloadKey], stop_at_miss: bool) -> bool:
        call = lambda: self.store.contains(keys, stop_at_miss)  # noqa: E731
        return self._submit(self._reads, ("contains", token, keys, call))

    def read(self, token: int, keys: Sequence[OffloadKey], into: Sequence[Bytes]) -> bool:
        call = lambda: self.store.read(keys, into)  # noqa: E731
        return self._submit(self._reads, ("read", token, keys, call))

    def write(self, token: int, key: OffloadKey, data: Bytes) -> bool:
        call = lambda: [self.store.write(key, data)]  # noqa: E731
        return self._submit(self._writes, ("write", token, [key], call))

    def delete(self, keys: Sequence[OffloadKey]) -> bool:
        def call() -> list[bool]:
            for key in keys:
                self.store.delete(key)
            return [True] * len(keys)

        return self._submit(self._writes, ("delete", -1, keys, call))

    def poll(self) -> list[TierResult]:
        """Answers since the last call."""
        results: list[TierResult] = []
        while self._results:
            results.append(self._results.popleft())
        self._pending -= len(results)
        return results

    @property
    def pending(self) -> int:
        """Tasks without a polled answer."""
        return self._pending

    def depths(self) -> tuple[int, int]:
        """(reads, writes) that wait for a thread."""
        return self._reads.qsize(), self._writes.qsize()

    def close(self, timeout: float = 5.0) -> None:
        """Let the threads finish what is queued, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for tasks in (self._reads, self._writes):
            for _ in range(len(self._threads) // 2):
                try:
                    tasks.put(None, timeout=max(0.0, deadline - time.monotonic()))
                except queue.Full:
                    log.warning("%s tier: closing with a full queue", self.name)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.store.close()

    def _submit(self, tasks: queue.Queue[Task | None], task: Task) -> bool:
        try:
            tasks.put_nowait(task)
        except queue.Full:
            if task[0] != "delete":  # which is tried again
                self._counters.add(f"{self.name}_dropped_{task[0]}s")
            return False
        self._pending += 1
        return True

    def _run(self, tasks: queue.Queue[Task | None]) -> None:
        while (task := tasks.get()) is not None:
            kind, token, keys, call = task
            began = time.perf_counter()
            try:
                ok = call()
            except Exception:  # noqa: BLE001  one task must not end the tier
                self._seldom.warning(kind, "%s tier: %s failed", self.name, kind, trace=True)
                self._counters.add(f"{self.name}_{kind}_exceptions")
                ok = [False] * len(keys)
            self._counters.add(f"{self.name}_{kind}_seconds", time.perf_counter() - began)
            self._counters.add(f"{self.name}_{kind}_blocks", sum(ok))
            self._results.append(TierResult(kind, token, keys, ok))
