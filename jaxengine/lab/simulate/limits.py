"""What breaks first: the highest rate that meets the service levels, and what stops the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.lab.bench.datasets import BenchRequest
from jaxengine.lab.bench.summary import METRICS
from jaxengine.lab.simulate.cluster import Cluster, simulate
from jaxengine.lab.simulate.outcome import Outcome
from jaxengine.lab.simulate.results import latencies, summarize
from jaxengine.lab.simulate.workload import faster

DOUBLINGS, BISECTIONS = 14, 5
OFTEN = 0.05  # share of steps from which on an obstacle is one


@dataclass(frozen=True)
class Slo:
    """Milliseconds by metric that the given percentile of requests must keep."""

    levels: dict[str, float]
    percentile: int = 90

    def violated(self, figures: dict[str, Any]) -> list[str]:
        """Names of the metrics that are above their level; "failed" when a request failed."""
        bad = [
            name
            for name, most in self.levels.items()
            if figures.get(f"p{self.percentile}_{name}_ms", 0.0) > most
        ]
        return [*bad, "failed"] if figures["failed"] else bad

    def goodput(self, outcome: Outcome) -> dict[str, float]:
        """Requests a second that kept every level, and their share, as `bench serve` counts
        them; levels of ITL are not those of a request and do not count."""
        good = [r for r in outcome.records if r.error is None and r.times]
        times = latencies(good)
        kept = np.ones(len(good), bool)
        decodes = np.array([len(r.times) > 1 for r in good], bool)
        for name in ("ttft", "e2el"):
            kept &= 1e3 * times[name] <= self.levels.get(name, np.inf)
        kept[decodes] &= 1e3 * times["tpot"] <= self.levels.get("tpot", np.inf)
        met = float(kept.sum())
        return {
            "request_goodput": met / (outcome.seconds or 1e-9),
            "good_share": met / max(1, len(outcome.records)),
        }


def parse_slo(words: Sequence[str], percentile: int = 90) -> Slo:
    """From "ttft:200" and the like. Raises ValueError naming the word."""
    levels = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            levels[name] = float(value)
        except ValueError:
            raise ValueError(f"slo {word!r} must be NAME:MILLISECONDS, as ttft:200") from None
        if name not in METRICS or not levels[name] > 0:
            raise ValueError(f"slo {word!r}: the names are {', '.join(METRICS)}, above 0 ms")
    if percentile not in (50, 90, 99):
        raise ValueError(f"slo percentile must be 50, 90 or 99, got {percentile}")
    return Slo(levels, percentile)


@dataclass(frozen=True)
class Limit:
    """What binds: kv_pool, slots, compute, host, host_memory_link, balancer or bursts."""

    name: str
    because: str


@dataclass(frozen=True)
class Try:
    """A run of the search at `factor` times the given rate."""

    factor: float
    offered_per_s: float
    violated: list[str]
    figures: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """`best` is None when even the slowest rate violates; `limit` None when none was found."""

    tries: list[Try]
    best: Try | None
    limit: Limit | None


def find_limit(
    cluster: Cluster,
    requests: Sequence[BenchRequest],
    slo: Slo,
    *,
    max_concurrency: int | None = None,
    seed: int = 0,
    told: Callable[[Try], None] = lambda _: None,
) -> Found:
    """Raise the rate (all arrivals closer together) until a level is violated, then bisect.

    Raises ValueError when all requests arrive at once: then there is no rate to raise.
    """
    span = max(r.arrival for r in requests) - min(r.arrival for r in requests)
    if span <= 0:
        raise ValueError("the search needs arrivals over time: give a request rate or a trace")
    tries: list[Try] = []

    def run(factor: float) -> Try:
        outcome = simulate(
            cluster, faster(requests, factor), max_concurrency=max_concurrency, seed=seed
        )
        figures = summarize(outcome)
        figures |= slo.goodput(outcome)
        one = Try(factor, len(requests) * factor / span, slo.violated(figures), figures)
        tries.append(one)
        told(one)
        return one

    best, worst = _bracket(run)
    if best is not None and worst is not None:
        for _ in range(BISECTIONS):
            middle = run((best.factor * worst.factor) ** 0.5)
            best, worst = (best, middle) if middle.violated else (middle, worst)
    return Found(tries, best, None if worst is None else diagnose(worst))


def _bracket(run: Callable[[float], Try]) -> tuple[Try | None, Try | None]:
    first = run(1.0)
    good, bad = (None, first) if first.violated else (first, None)
    for _ in range(DOUBLINGS):
        if good is not None and bad is not None:
            break
        if bad is None:
            assert good is not None
            one = run(2 * good.factor)
        else:
            one = run(bad.factor / 2)
        good, bad = (good, one) if one.violated else (one, bad)
    return good, bad


def diagnose(one: Try) -> Limit:
    """Name what binds in a run that violates a level. The rules, in this order, are those of
    docs/simulate.md."""
    e = one.figures["engine"]
    steps = max(1, e["steps"])
    obstacles = {name: n / steps for name, n in e["steps_with_waiting_by_obstacle"].items()}
    busy = e["device_utilisation"]
    starved = e["device_starved"] / max(1e-9, e["device_starved"] + busy)
    if starved > 0.2:
        return Limit("host", f"the device waits for the host {starved:.0%} of its working time")
    least, most = e["device_utilisation_min"], e["device_utilisation_max"]
    if e["waiting_rank_peak"] > 2 and most > 0.9 and least < 0.6:
        return Limit(
            "balancer",
            f"requests wait at one rank (device {most:.0%} busy) while another is {least:.0%} "
            f"busy; the fullest rank got {e['requests_of_a_rank_max_over_mean']:.2f} times the "
            "mean",
        )
    preempted = e["preemptions"] / max(1, one.figures["completed"])
    name, share = max(obstacles.items(), key=lambda item: item[1], default=("", 0.0))
    if preempted > 0.05 and e["kv_usage_peak"] > 0.95:
        return Limit(
            "kv_pool",
            f"the KV pool is full: {e['preemptions']} preemptions of "
            f"{one.figures['completed']} requests",
        )
    if share > OFTEN:
        why = f"in {share:.0%} of the steps somebody waits for"
        if name == "blocks":
            return Limit("kv_pool", f"{why} KV blocks; the pool is {e['kv_usage_peak']:.0%} full")
        if name == "slots":
            return Limit("slots", f"{why} a slot: max_num_seqs rows run")
        if name == "loads":
            return Limit("host_memory_link", f"{why} KV on its way from host memory")
        return Limit(
            "compute", f"{why} tokens of a step: prefill fills max_num_batched_tokens{_bound(e)}"
        )
    if busy < 0.7:
        return Limit(
            "bursts", f"devices are only {busy:.0%} busy: requests come in bursts, or alone"
        )
    return Limit("compute", f"nobody waits in line, but steps take too long{_bound(e)}")


def _bound(engine: dict[str, Any]) -> str:
    bounds = engine["device_time_by_bound"]
    if not bounds:
        return ""
    name, share = max(bounds.items(), key=lambda item: item[1])
    return f"; {share:.0%} of the device's time are steps bound by {name}"


def lines(found: Found, slo: Slo) -> list[str]:
    """The search for a terminal."""
    levels = ", ".join(f"{name} {most:g} ms" for name, most in slo.levels.items())
    out = [
        f"levels at p{slo.percentile}: {levels}",
        f"{'offered/s':>10}{'served/s':>10}{'TTFT':>10}{'TPOT':>9}{'busy':>6}{'KV peak':>9}"
        f"{'preempt':>9}{'waiting':>9}  violated",
    ]
    key = f"p{slo.percentile}"
    for t in sorted(found.tries, key=lambda t: t.factor):
        f, e = t.figures, t.figures["engine"]
        out.append(
            f"{t.offered_per_s:>10.3g}{f['request_throughput']:>10.3g}"
            f"{f.get(f'{key}_ttft_ms', 0):>10.1f}{f.get(f'{key}_tpot_ms', 0):>9.2f}"
            f"{e['device_utilisation']:>6.0%}{e['kv_usage_peak']:>9.0%}{e['preemptions']:>9}"
            f"{e['waiting_peak']:>9.0f}  {' '.join(t.violated)}"
        )
    if found.best is None:
        out.append("no rate that was tried meets the levels")
    else:
        out.append(f"highest rate that meets the levels: {found.best.offered_per_s:.4g} requests/s")
    if found.limit is None:
        out.append("nothing breaks: the workload is too small, more requests are needed")
    else:
        out.append(f"what breaks first: {found.limit.name}: {found.limit.because}")
    return out
