"""Log lines that may come by the thousand, such as one for each block of a full disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable


class SeldomLog:
    """Lets one warning of a kind through every `seconds`; the next says how many were left out.

    Thread-safe. Kinds are a few fixed names.
    """

    def __init__(
        self,
        log: logging.Logger,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._next: dict[str, float] = {}  # by kind; before it nothing is logged
        self._left_out: dict[str, int] = {}
        self._lock = threading.Lock()

    def warning(self, kind: str, text: str, *args: object, trace: bool = False) -> None:
        """Log `text % args`; with `trace` the exception that is being handled, too."""
        with self._lock:
            now = self._clock()
            if now < self._next.get(kind, now):
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                return
            self._next[kind] = now + self._seconds
            left_out = self._left_out.pop(kind, 0)
        if left_out:
            text += f" ({left_out} more since the last such line)"
        self._log.warning(text, *args, exc_info=trace)
