"""Faults on purpose, for drills and tests: which step fails, and how. Off unless asked for."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence

from jaxengine.settings.faults import Fault

_FOREVER = 10**6  # seconds


class InjectedFault(RuntimeError):
    """Raised by an injected fault of kind `raise`."""


class Injector:
    """Counts steps and resets; lives in the engine process, so that a new worker does not start
    over."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self._counts: Counter[str] = Counter()

    def next(self, during: str) -> Fault | None:
        """The fault of the step or reset that begins now."""
        if not self._faults:
            return None
        self._counts[during] += 1
        at = self._counts[during]
        for fault in self._faults:
            if fault.during == during and fault.step <= at < fault.step + fault.times:
                return fault
        return None


def carry_out(fault: Fault) -> None:
    """Fail as planned. Returns after `slow` only."""
    match fault.kind:
        case "raise":
            raise InjectedFault("injected")
        case "oom":
            raise MemoryError("injected")
        case "hang":
            time.sleep(_FOREVER)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "slow":
            time.sleep(fault.seconds)
