"""Charts of `bench report`, drawn by matplotlib and given as data URIs of SVG."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.lab.bench.flatten import direction

if TYPE_CHECKING:
    from jaxengine.lab.bench.report_page import Run

_LATENCIES = ("ttft", "tpot", "itl", "e2el")
_MAX_BARS = 24  # of a figure: beyond it labels cannot be read
Chart = tuple[str, str]  # what it shows, and its data URI


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Of a load: latencies, and their distributions where requests were saved. Of a bench with
    rows: a chart a figure. Raises ValueError without matplotlib."""
    if runs[0].content["bench"] == "serve":
        found = [_latencies(runs)]
        detailed = [run for run in runs if run.content.get("requests")]
        return found + ([_distributions(detailed)] if detailed else [])
    return _by_row(runs)


def _names(runs: Sequence[Run]) -> list[str]:
    """Of the figures of any of the runs."""
    return list(dict.fromkeys(name for run in runs for name in run.figures))


def _figure(columns: int, width: float = 4.0) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("bench report needs matplotlib: pip install 'jaxengine[bench]'") from None
    figure = Figure(figsize=(width * columns, 3.2), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _uri(figure: Any) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()


def _latencies(runs: Sequence[Run]) -> Chart:
    """Mean and percentiles of each latency, a bar a run."""
    figure, axes = _figure(len(_LATENCIES), 3.2)
    for axis, metric in zip(axes, _LATENCIES, strict=True):
        ends = f"_{metric}_ms"
        names = [n for n in _names(runs) if n.endswith(ends) and n[:3] not in ("std", "med")]
        labels = [name.removesuffix(f"_{metric}_ms") for name in names]
        _bars(axis, labels, {r.name: [r.figures.get(n, 0.0) for n in names] for r in runs})
        axis.set_title(f"{metric.upper()} (ms)")
    axes[0].legend(fontsize=8)
    return "latencies in milliseconds", _uri(figure)


def _distributions(runs: Sequence[Run]) -> Chart:
    """Share of requests within a time."""
    figure, axes = _figure(3)
    for axis, metric in zip(axes, ("ttft", "tpot", "e2el"), strict=True):
        for run in runs:
            values = sorted(r[metric] for r in run.content["requests"] if r.get(metric) is not None)
            if values:
                share = np.arange(1, len(values) + 1) / len(values)
                axis.step(values, share, where="post", label=run.name)
        axis.set_title(f"requests within {metric.upper()} (ms)")
        axis.set_ylim(0, 1)
    axes[0].legend(fontsize=8)
    return "share of requests within a latency", _uri(figure)


def _by_row(runs: Sequence[Run]) -> list[Chart]:
    """A chart for each figure that several rows have and that can be better or worse, or one for
    all single figures."""
    groups: dict[str, list[str]] = {}
    for name in _names(runs):
        label, _, figure = name.rpartition("/")
        groups.setdefault(figure if label else name, []).append(name)
    found = []
    for title, names in groups.items():
        if not 1 < len(names) <= _MAX_BARS or not direction(names[0]):
            continue
        figure, (axis,) = _figure(1, max(6.0, 0.35 * len(names) * len(runs)))
        labels = [name.rpartition("/")[0] for name in names]
        _bars(axis, labels, {r.name: [r.figures.get(n, 0.0) for n in names] for r in runs})
        axis.set_title(title)
        axis.legend(fontsize=8)
        found.append((title, _uri(figure)))
    return found or [_ratios(runs)]


def _ratios(runs: Sequence[Run]) -> Chart:
    """Figures of the later runs as ratios to the first."""
    names = [n for n, value in runs[0].figures.items() if value][:_MAX_BARS]
    figure, (axis,) = _figure(1, max(6.0, 0.5 * len(names)))
    base = runs[0].figures
    _bars(axis, names, {r.name: [r.figures.get(n, 0.0) / base[n] for n in names] for r in runs})
    axis.axhline(1, color="gray", linewidth=0.8)
    axis.set_title(f"ratio to {runs[0].name}")
    axis.legend(fontsize=8)
    return f"ratios to {runs[0].name}", _uri(figure)


def _bars(axis: Any, labels: Sequence[str], series: dict[str, list[float]]) -> None:
    """Bars side by side: a group a label, a colour a run."""
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        axis.bar(np.arange(len(labels)) + i * width, values, width, label=_plain(name))
    axis.set_xticks(np.arange(len(labels)) + 0.4 - width / 2, [_plain(x) for x in labels])
    crowded = sum(map(len, labels)) > 30
    axis.tick_params(axis="x", rotation=60 if crowded else 0, labelsize=7 if crowded else 8)


def _plain(text: str) -> str:
    """Without matplotlib's mathematics, and not hidden from the legend by a leading underscore."""
    return text.replace("$", r"\$").lstrip("_") or "-"
