"""Figures of a load: totals, means and percentiles, goodput. Names are those of vLLM's results.

TTFT: time to the first token. TPOT: time per output token after the first, a mean per request.
ITL: gaps between streamed pieces. E2EL: time to the last token. All in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxengine.lab.bench.client import Trace

METRICS = ("ttft", "tpot", "itl", "e2el")


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` as limits in milliseconds. Raises ValueError."""
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"--goodput {word}: give NAME:MILLISECONDS, as ttft:200") from None
        if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
            raise ValueError(f"--goodput {word}: name one of ttft, tpot, e2el and a time above 0")
    return limits


def parse_percentiles(text: str) -> list[float]:
    """`50,90,99` as numbers. Raises ValueError."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--metric-percentiles {text}: give numbers and commas") from None
    if not all(0 <= p <= 100 for p in found):
        raise ValueError(f"--metric-percentiles {text}: each must be from 0 to 100")
    return found


def latencies(trace: Trace) -> dict[str, float | None]:
    """The request's TTFT, TPOT and E2EL in milliseconds; TPOT is None for a single token."""
    more = trace.num_tokens - 1
    return {
        "ttft": 1e3 * (trace.first - trace.started),
        "tpot": 1e3 * (trace.last - trace.first) / more if more > 0 else None,
        "e2el": 1e3 * (trace.last - trace.started),
    }


def summarize(
    traces: Sequence[Trace],
    seconds: float,
    *,
    percentiles: Sequence[float] = (50, 90, 99),
    limits: dict[str, float] | None = None,
) -> dict[str, Any]:
    """The figures as a flat mapping: duration, completed, request_throughput, mean_ttft_ms,
    p99_ttft_ms, ... `limits` (milliseconds) make a request good or not."""
    good = [t for t in traces if t.error is None]
    each = [latencies(t) for t in good]
    output, prompt = sum(t.num_tokens for t in good), sum(t.prompt_len for t in good)
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(traces) - len(good),
        "errors": sorted({t.error for t in traces if t.error is not None})[:5],
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
    }
    if limits:
        met = sum(within(one, limits) for one in each)
        figures["request_goodput"] = met / seconds
        figures["good_share"] = met / max(1, len(traces))
    samples = {
        name: [value for one in each if (value := one[name]) is not None]
        for name in ("ttft", "tpot", "e2el")
    }
    samples["itl"] = [1e3 * gap for t in good for gap in t.gaps]
    for name in METRICS:
        figures |= spread(name, samples[name], percentiles)
    return figures


def within(latency: dict[str, float | None], limits: dict[str, float]) -> bool:
    """Are all limits met? A request of one token meets any TPOT."""
    values = ((latency[name], limit) for name, limit in limits.items())
    return all(value is None or value <= limit for value, limit in values)


def spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean_NAME_ms, median_, std_ and pNN_ of values in milliseconds; nothing where there are
    none."""
    if not values:
        return {}
    array = np.asarray(values)
    figures = {"mean": array.mean(), "median": np.median(array), "std": array.std()}
    figures |= {f"p{p:g}": np.percentile(array, p) for p in percentiles}
    return {f"{key}_{name}_ms": float(value) for key, value in figures.items()}


def table(figures: dict[str, Any], metrics: Sequence[str] = METRICS) -> list[str]:
    """Lines for a terminal: totals, then a row of latencies a metric."""
    f = figures
    lines = [f"{f['completed']} requests in {f['duration']:.2f} s, {f['failed']} failed"]
    lines += [f"  {error}" for error in f["errors"]]
    lines.append(
        f"{f['request_throughput']:.2f} requests/s, {f['output_throughput']:.1f} output tokens/s, "
        f"{f['total_token_throughput']:.1f} tokens/s in all"
    )
    if "request_goodput" in f:
        lines.append(f"goodput {f['request_goodput']:.2f} requests/s, {f['good_share']:.1%}")
    heads: list[str] = []
    for name in metrics:
        keys = [k for k in f if k.endswith(f"_{name}_ms")]
        if keys and not heads:
            heads = [k.removesuffix(f"_{name}_ms") for k in keys]
            lines.append(f"{'ms':<6}" + "".join(f"{head:>10}" for head in heads))
        if keys:
            lines.append(f"{name.upper():<6}" + "".join(f"{f[k]:>10.2f}" for k in keys))
    return lines
