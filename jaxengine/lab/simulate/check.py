"""The simulator against the real engine: the same requests, the same sizes, on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxengine.engine.core import EngineCore
from jaxengine.lab.bench.datasets import BenchRequest, arrivals, with_arrivals
from jaxengine.lab.simulate.calibrate import Calibration
from jaxengine.lab.simulate.clock import Clock, WallClock
from jaxengine.lab.simulate.cluster import Cluster, simulate
from jaxengine.lab.simulate.recorder import drive
from jaxengine.lab.simulate.results import summarize
from jaxengine.lab.simulate.table import Table
from jaxengine.lab.simulate.workload import fixed_requests

METRICS = ("output_throughput", "mean_ttft_ms", "mean_e2el_ms")
LIMIT = 0.15
LOAD = 0.5  # of what the engine could do, where requests arrive over time


@dataclass(frozen=True)
class Case:
    """A workload. `paced`: Poisson arrivals, else all at once."""

    name: str
    requests: list[BenchRequest]
    paced: bool


@dataclass(frozen=True)
class Comparison:
    """One metric of one workload over the rounds: means, and simulated / real - 1."""

    case: str
    metric: str
    real: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.real - 1


def cases() -> list[Case]:
    """Decode-heavy, prefill-heavy, and shared prefixes with Poisson arrivals."""
    return [
        Case("decode-heavy", fixed_requests(8, 32, 40), False),
        Case("prefill-heavy", fixed_requests(6, 320, 4), False),
        Case("shared-prefix", fixed_requests(12, 40, 16, prefix_len=192, prefixes=2), True),
    ]


def check(
    core: EngineCore, rounds: int, told: Callable[[str], None], clock: Clock | None = None
) -> list[Comparison]:
    """Measure and run in turns, so that a machine that others use disturbs both alike; a round is
    predicted from the measurements before and after it."""
    clock = clock or WallClock()
    # No workload has more rows.
    calibration = Calibration(core, most_rows=12, clock=clock)
    calibration.warm()
    before = _measured(calibration, told)
    chosen = cases()
    chosen = [_paced(case, before.table()) if case.paced else case for case in chosen]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for i in range(rounds):
        told(f"round {i + 1}: real runs")
        real = [_real(core, case, clock, i) for case in chosen]
        after = _measured(calibration, told)
        # Both sides of the runs.
        calibration.samples = before.samples + after.samples
        table = calibration.table()
        for case, one in zip(chosen, real, strict=True):
            other = _simulated(table, case, i)
            for metric in METRICS:
                found.setdefault((case.name, metric), []).append((one[metric], other[metric]))
        before = after
    return [
        Comparison(case, metric, *(statistics.fmean(side) for side in zip(*pairs, strict=True)))
        for (case, metric), pairs in found.items()
    ]


@dataclass(frozen=True)
class _Measured:
    calibration: Calibration
    samples: list[Any]

    def table(self) -> Table:
        return self.calibration.table()


def _measured(calibration: Calibration, told: Callable[[str], None]) -> _Measured:
    calibration.samples = []
    calibration.round(lambda what: told(f"measuring: {what}"))
    return _Measured(calibration, list(calibration.samples))


def _paced(case: Case, table: Table) -> Case:
    """Arrivals at a share of the rate at which the table says that the requests can be served."""
    outcome = simulate(_cluster(table), case.requests)
    rate = LOAD * len(case.requests) / outcome.seconds
    times = arrivals(len(case.requests), rate, seed=1)
    return Case(case.name, with_arrivals(case.requests, times), True)


def _cluster(table: Table) -> Cluster:
    return Cluster(table.sched_sizes(), table, depth=table.depth)


def _real(core: EngineCore, case: Case, clock: Clock, seed: int) -> dict[str, Any]:
    core.scheduler.reset_prefix_cache()
    last = core.facts.spec.vocab_size - 1
    return summarize(drive(core, case.requests, clock, seed, last))


def _simulated(table: Table, case: Case, seed: int) -> dict[str, Any]:
    return summarize(simulate(_cluster(table), case.requests, seed=seed))


def lines(comparisons: Sequence[Comparison]) -> list[str]:
    """A table of the errors."""
    out = [f"{'workload':<15}{'metric':<21}{'real':>11}{'simulated':>11}{'error':>8}"]
    for c in comparisons:
        out.append(f"{c.case:<15}{c.metric:<21}{c.real:>11.2f}{c.simulated:>11.2f}{c.error:>+8.1%}")
    worst = max(abs(c.error) for c in comparisons)
    out.append(f"largest error {worst:.1%}; the limit is {LIMIT:.0%}")
    return out
