"""A result file as {path: number}, and which way is better: what sweeps and reports compare."""

from __future__ import annotations

from typing import Any

_MORE_IS_BETTER = ("per_s", "throughput", "goodput", "share", "acceptance", "mib_s", "sooner",
                   "mean_length")  # fmt: skip
_LESS_IS_BETTER = ("_ms", "_s", "us", "latency", "latencies", "failed", "percentiles", "rss_mib",
                   "perplexity", "worst_row", "us_per_step", "us_per_request_step")  # fmt: skip
_NOT_FIGURES = ("bench", "created", "machine", "settings", "row_keys", "requests", "cell")


def flatten(content: dict[str, Any]) -> dict[str, float]:
    """Every number of a result, by names joined with "/". A row of a table is named by its
    `row_keys`: "requests=8/tokens_per_s"."""
    found: dict[str, float] = {}
    keys = content.get("row_keys") or []
    for name, value in content.items():
        if name == "rows":
            for row in value:
                label = " ".join(f"{key}={row[key]}" for key in keys if key in row)
                rest = {k: v for k, v in row.items() if k not in keys}
                _collect(label, rest, found)
        elif name not in _NOT_FIGURES:
            _collect(name, value, found)
    return found


def _collect(name: str, value: Any, found: dict[str, float]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{name}/{key}", item, found)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found[name] = float(value)


def direction(name: str) -> int:
    """1 where more is better, -1 where less is, 0 where that depends."""
    last = name.lower().split("/")[-1]
    first = name.lower().split("/")[0]
    if any(word in last for word in _MORE_IS_BETTER):
        return 1
    return -1 if last.endswith(_LESS_IS_BETTER) or first in _LESS_IS_BETTER else 0
