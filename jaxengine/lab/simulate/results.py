"""Figures of a run, by the names of `bench serve`, and a short table of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from jaxengine.lab.bench.summary import spread, table
from jaxengine.lab.simulate.outcome import Outcome, Record

PERCENTILES = (50, 90, 99)


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Totals, latencies in milliseconds, and under "engine" what the ranks say."""
    good = [r for r in outcome.records if r.error is None and r.times]
    errors = [r.error for r in outcome.records if r.error is not None]
    seconds = outcome.seconds or 1e-9
    output = sum(len(r.times) for r in good)
    prompt = sum(r.prompt_len for r in good)
    figures: dict[str, Any] = {
        "duration": outcome.seconds,
        "completed": len(good),
        "failed": len(outcome.records) - len(good),
        "errors": sorted(set(errors))[:5],
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (output + prompt) / seconds,
    }
    for name, values in latencies(good).items():
        figures |= spread(name, (1e3 * values).tolist(), PERCENTILES)
    return {**figures, "engine": engine_figures(outcome)}


def latencies(good: list[Record]) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Seconds, as the clients saw them."""
    times = [np.frombuffer(r.times, np.float64) for r in good]
    several = [t for t in times if len(t) > 1]
    return {
        "ttft": np.array([t[0] - r.arrival for r, t in zip(good, times, strict=True)]),
        "tpot": np.array([(t[-1] - t[0]) / (len(t) - 1) for t in several]),
        "itl": np.concatenate([np.diff(t) for t in several]) if several else np.zeros(0),
        "e2el": np.array([t[-1] - r.arrival for r, t in zip(good, times, strict=True)]),
    }


def engine_figures(outcome: Outcome) -> dict[str, Any]:
    """Utilisation, caches, queues and skew. Shares are 0 to 1."""
    ranks = outcome.ranks
    seconds = outcome.seconds or 1e-9
    steps = sum(r.steps for r in ranks)
    busy = np.array([r.device_s for r in ranks]) / seconds
    queries = sum(r.prefix_queries for r in ranks)
    waiting = queue_lengths(outcome.records)
    bounds: Counter[str] = Counter()
    obstacles: Counter[str] = Counter()
    for rank in ranks:
        bounds.update(rank.bounds)
        obstacles.update(rank.obstacles)
    device_s = sum(r.device_s for r in ranks) or 1e-9
    return {
        "ranks": len(ranks),
        "steps": steps,
        "rows_per_step": sum(r.rows for r in ranks) / max(1, steps),
        "tokens_per_step": sum(r.tokens for r in ranks) / max(1, steps),
        "device_utilisation": float(busy.mean()),
        "device_utilisation_min": float(busy.min()),
        "device_utilisation_max": float(busy.max()),
        "device_starved": sum(r.starved_s for r in ranks) / seconds / len(ranks),
        "host_utilisation": sum(r.host_s for r in ranks) / seconds / len(ranks),
        "device_time_by_bound": {name: s / device_s for name, s in sorted(bounds.items())},
        "kv_usage_mean": sum(r.kv_sum for r in ranks) / max(1, steps),
        "kv_usage_peak": max(r.kv_peak for r in ranks),
        "prefix_hit_rate": sum(r.prefix_hits for r in ranks) / max(1, queries),
        "host_hit_rate": sum(r.host_hits for r in ranks) / max(1, queries),
        "kv_loaded_gib": sum(r.loaded_bytes for r in ranks) / 2**30,
        "kv_stored_gib": sum(r.stored_bytes for r in ranks) / 2**30,
        "preemptions": sum(r.preemptions for r in ranks),
        "waiting_mean": waiting["mean"],
        "waiting_peak": waiting["peak"],
        "waiting_last_arrival": waiting["last_arrival"],
        "waiting_half_time": waiting["half_time"],
        "waiting_rank_peak": max(r.most_waiting for r in ranks),
        "requests_of_a_rank_max_over_mean": _skew([r.requests for r in ranks]),
        "steps_with_waiting_by_obstacle": dict(sorted(obstacles.items())),
    }


def queue_lengths(records: list[Record]) -> dict[str, float]:
    """Requests that had come and were in no step yet: over time, and at two moments of the
    arrivals (half of them in time, and the last): a queue that grows is longer at the second."""
    waits = [(r.arrival, r.scheduled) for r in records if r.scheduled >= 0]
    if not waits:
        return {"mean": 0.0, "peak": 0.0, "last_arrival": 0.0, "half_time": 0.0}
    came, left = (np.sort(np.array(column)) for column in zip(*waits, strict=True))
    times = np.concatenate([came, left])
    change = np.concatenate([np.ones(len(came)), -np.ones(len(left))])
    # Those that leave at a moment leave after those that come.
    order = np.lexsort((-change, times))
    length = np.cumsum(change[order])
    span = max(times[order[-1]] - came[0], 1e-9)
    total = float(np.sum(left) - np.sum(came))

    def at(moment: float) -> float:
        return float(np.sum(came <= moment) - np.sum(left <= moment))

    return {
        "mean": total / span,
        "peak": float(length.max()),
        "last_arrival": at(came[-1]),
        "half_time": at((came[0] + came[-1]) / 2),
    }


def _skew(counts: list[int]) -> float:
    mean = sum(counts) / len(counts)
    return max(counts) / mean if mean else 0.0


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures for a terminal."""
    engine = figures["engine"]
    out = table(figures)
    out += [
        f"ranks {engine['ranks']}: device busy {engine['device_utilisation']:.0%} "
        f"({engine['device_utilisation_min']:.0%} to {engine['device_utilisation_max']:.0%}), "
        f"starved by the host {engine['device_starved']:.1%}; "
        f"{engine['rows_per_step']:.1f} rows and {engine['tokens_per_step']:.1f} tokens a step",
        f"KV pool {engine['kv_usage_mean']:.0%} full, peak {engine['kv_usage_peak']:.0%}; "
        f"{engine['preemptions']} preemptions; prompt tokens found: "
        f"{engine['prefix_hit_rate']:.1%} on the device, {engine['host_hit_rate']:.1%} in host "
        "memory",
        f"waiting: {engine['waiting_mean']:.1f} on average, peak {engine['waiting_peak']:.0f}, "
        f"{engine['waiting_half_time']:.0f} at half time, {engine['waiting_last_arrival']:.0f} at "
        f"the last arrival; fullest rank {engine['requests_of_a_rank_max_over_mean']:.2f} times "
        "the mean",
    ]
    return out
