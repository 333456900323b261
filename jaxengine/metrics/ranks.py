"""Metrics of the ranks' health: faults, recoveries, what became of the requests."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from jaxengine.wire.health import DEAD, HEALTHY, STARTING, STATES, UNHEALTHY


class RankMetrics:
    """Families with the label `engine`, the rank. See `front.ranks.placing.Watcher`."""

    def __init__(self, registry: CollectorRegistry, model_name: str, ranks: Iterable[int]) -> None:
        self._model = model_name
        labels = ["model_name", "engine"]
        self._state = Gauge(
            "jaxengine:engine_state",
            "1 for the state that the engine is in.",
            [*labels, "state"],
            registry=registry,
        )
        self._faults = Counter(
            "jaxengine:engine_faults",
            "Faults by class of the exception (ProcessDied: no last words).",
            [*labels, "kind"],
            registry=registry,
        )
        self._recoveries = Counter(
            "jaxengine:engine_recoveries",
            "Recoveries by outcome.",
            [*labels, "outcome"],
            registry=registry,
        )
        self._down = Counter(
            "jaxengine:engine_unhealthy_seconds",
            "Seconds in which the engine, once up, took no requests because of a fault.",
            labels,
            registry=registry,
        )
        self._aborted = Counter(
            "jaxengine:fault_aborted_requests",
            "Sequences that a fault ended.",
            labels,
            registry=registry,
        )
        self._replayed = Counter(
            "jaxengine:fault_replayed_requests",
            "Sequences of a failed engine that went on in another.",
            labels,
            registry=registry,
        )
        self._down_since: dict[int, float | None] = {}
        self._up: set[int] = set()  # ranks that were healthy once
        for rank in ranks:
            name = self._labels(rank)
            for family in (self._down, self._aborted, self._replayed):
                family.labels(**name)
            for outcome in ("ok", "failed"):
                self._recoveries.labels(**name, outcome=outcome)
            self.state(rank, STARTING)

    def _labels(self, rank: int) -> dict[str, str]:
        return {"model_name": self._model, "engine": str(rank)}

    def state(self, rank: int, state: str) -> None:
        """A rank is in `state` now."""
        for name in STATES:
            self._state.labels(**self._labels(rank), state=name).set(name == state)
        self.tick()
        if state == HEALTHY:
            self._up.add(rank)
        down = state in (UNHEALTHY, DEAD) or (state == STARTING and rank in self._up)
        self._down_since[rank] = time.monotonic() if down else None

    def tick(self) -> None:
        """Count the seconds up to now."""
        now = time.monotonic()
        for rank, since in self._down_since.items():
            if since is not None:
                self._down.labels(**self._labels(rank)).inc(now - since)
                self._down_since[rank] = now

    def fault(self, rank: int, kind: str) -> None:
        self._faults.labels(**self._labels(rank), kind=kind).inc()

    def recovery(self, rank: int, ok: bool) -> None:
        outcome = "ok" if ok else "failed"
        self._recoveries.labels(**self._labels(rank), outcome=outcome).inc()

    def aborted(self, rank: int) -> None:
        self._aborted.labels(**self._labels(rank)).inc()

    def replayed(self, rank: int) -> None:
        self._replayed.labels(**self._labels(rank)).inc()
