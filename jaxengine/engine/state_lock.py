"""The lock on a scheduler's state: the loop's while it plans and reconciles, free while it waits.

So an abort from another thread takes effect while the device works, and the next plan has its room.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 0.1  # seconds that another thread waits for the loop


class StateLock:
    """`with lock:` holds it; the loop's thread may enter it again inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held_long = False  # as far as another thread found out

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free inside of the block, while the loop waits for the device."""
        self._held_long = False
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    @contextmanager
    def taken_soon(self) -> Iterator[bool]:
        """Hold it inside of the block from another thread; False where the loop holds it for long.
        Waits only once for such a turn of the loop: the thread has other messages to pass on."""
        held = self._lock.acquire(timeout=0 if self._held_long else _PATIENCE)
        self._held_long = not held
        try:
            yield held
        finally:
            if held:
                self._lock.release()
