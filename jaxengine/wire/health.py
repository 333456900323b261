"""What the front knows of every rank's health, and what happened to it so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jaxengine.wire.messages import RankStatus

STARTING, HEALTHY, UNHEALTHY, DEAD, DRAINING = (
    "starting",
    "healthy",
    "unhealthy",
    "dead",
    "draining",
)
STATES = (STARTING, HEALTHY, UNHEALTHY, DEAD, DRAINING)
_HISTORY = 256  # changes and orders that are kept


@dataclass
class RankHealth:
    """One rank. `last_order` and `error` are of the last order to it (None: it succeeded)."""

    state: str = STARTING
    epoch: int = 0
    fault_info: str | None = None
    since: float = 0.0
    last_order: str | None = None
    error: str | None = None


class Board:
    """The ranks' states, from the engines' own words (and the front's, when a process is gone).

    `changed(rank, before, after)` is called at every change of state.
    """

    def __init__(self, ranks: Iterable[int], changed: Callable[[int, str, str], None]) -> None:
        self.ranks = {rank: RankHealth(since=time.time()) for rank in ranks}
        self._changed = changed
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)

    def healthy(self) -> list[int]:
        """The ranks that take new requests."""
        return [rank for rank, health in self.ranks.items() if health.state == HEALTHY]

    def describe(self) -> str:
        """One clause on the state of all."""
        if len(self.ranks) == 1:
            return f"it is {next(iter(self.ranks.values())).state}"
        return ", ".join(f"rank {r} is {h.state}" for r, h in self.ranks.items())

    def update(self, status: RankStatus) -> None:
        """Take over a rank's status."""
        health = self.ranks[status.rank]
        before = health.state
        health.state, health.epoch = status.state, max(health.epoch, status.epoch)
        health.fault_info = None if status.state == HEALTHY else status.fault_info
        health.since = status.since or time.time()
        if before == status.state:
            return
        event: dict[str, Any] = {
            "time": health.since,
            "id": status.rank,
            "status": status.state,
            "epoch": health.epoch,
        }
        if health.fault_info is not None:
            event["fault_info"] = health.fault_info
        self._history.append(event)
        self._changed(status.rank, before, status.state)

    def ordered(self, rank: int, request_id: str, instruction: str, error: str | None) -> None:
        """An order to a rank ended; `error` None when it succeeded."""
        health = self.ranks[rank]
        health.last_order, health.error = request_id, error
        event: dict[str, Any] = {
            "time": time.time(),
            "id": rank,
            "request_id": request_id,
            "instruction": instruction,
            "success": error is None,
        }
        if error is not None:
            event["reason"] = error
        self._history.append(event)

    def payload(self) -> dict[str, Any]:
        """The body of GET /fault_tolerance/status. No engine is asked: it works while they hang."""
        return {
            "schema_version": 1,
            "total_engines": len(self.ranks),
            "engines": [_entry(rank, health) for rank, health in self.ranks.items()],
            "history": list(self._history),
        }


def _entry(rank: int, health: RankHealth) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": rank,
        "status": health.state,
        "epoch": health.epoch,
        "since": health.since,
    }
    if health.fault_info is not None:
        entry["fault_info"] = health.fault_info
    if health.last_order is not None:
        entry["last_ft_request_id"] = health.last_order
    if health.error is not None:
        entry["ft_error"] = health.error
    return entry
