"""Faults on purpose, for drills and tests: which step fails, and how. Off unless asked for."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from jaxengine.config import EngineConfig

_FOREVER = 10**6  # seconds


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One planned fault: `times` in a row, beginning with the `step`-th step (or reset) since the
    engine started. `where`: in the worker that owns the device, or in the engine itself."""

    kind: Literal["raise", "oom", "hang", "kill", "exit", "slow"]
    step: int
    rank: int = 0
    times: int = 1
    where: Literal["worker", "engine"] = "worker"
    during: Literal["step", "reset"] = "step"
    seconds: float = 1.0  # of slow


class InjectedFault(RuntimeError):
    """What an injected `raise` raises."""


def parse_faults(text: str | None) -> list[Fault]:
    """Raises ValueError that names the setting and what is wrong with it."""
    if text is None:
        return []
    try:
        faults = msgspec.json.decode(text, type=list[Fault])
    except msgspec.MsgspecError as error:
        raise ValueError(f"inject_faults: {error}") from None
    for fault in faults:
        if fault.step < 1 or fault.times < 1 or fault.seconds < 0:
            raise ValueError("inject_faults: step and times must be at least 1, seconds at least 0")
    return faults


def for_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """The configuration with only this rank's planned faults."""
    if config.fault.inject_faults is None:
        return config
    mine = [fault for fault in parse_faults(config.fault.inject_faults) if fault.rank == rank]
    text = msgspec.json.encode(mine).decode() if mine else None
    return replace(config, fault=replace(config.fault, inject_faults=text))


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
