"""What time a measurement goes by."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds."""
        ...

    def wait_until(self, when: float) -> None: ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self.now()))


class CpuClock:
    """CPU seconds of all threads of this process: what others do on the machine hardly counts.
    Waiting takes no time: the clock is set forward."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def now(self) -> float:
        return time.process_time() + self._skipped

    def wait_until(self, when: float) -> None:
        self._skipped += max(0.0, when - self.now())
