"""The HTML of `bench report`: tables of figures with their ratios, charts, machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from jaxengine.lab.bench.flatten import direction, flatten
from jaxengine.lab.bench.report_charts import charts

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #222; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
.better { color: #087f23 } .worse { color: #b00020 }
img { max-width: 100% } small { color: #666 }
"""


@dataclass(frozen=True)
class Run:
    """A result file and what to call it."""

    name: str
    content: dict[str, Any]

    @property
    def figures(self) -> dict[str, float]:
        return flatten(self.content)


def page(runs: Sequence[Run]) -> str:
    """The whole page; a section a bench."""
    benches = dict.fromkeys(run.content["bench"] for run in runs)
    sections = [
        section(str(bench), [run for run in runs if run.content["bench"] == bench])
        for bench in benches
    ]
    title = "Benchmarks: " + ", ".join(run.name for run in runs)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def section(bench: str, runs: Sequence[Run]) -> str:
    """Figures, charts, machines and settings of the runs of one bench."""
    parts = [f"<h2>{escape(bench)}</h2>", figures_table(runs)]
    parts += [f'<p><img alt="{escape(alt)}" src="{uri}"></p>' for alt, uri in charts(runs)]
    parts += ["<h3>Where</h3>", table(["", *(r.name for r in runs)], _where(runs))]
    parts += ["<h3>Settings</h3>", _settings(runs)]
    return "\n".join(parts)


def figures_table(runs: Sequence[Run]) -> str:
    """A row a figure; runs after the first also as a ratio to it."""
    names = dict.fromkeys(name for run in runs for name in run.figures)
    head = ["figure", runs[0].name]
    for run in runs[1:]:
        head += [run.name, "ratio"]
    lines = []
    for name in names:
        base = runs[0].figures.get(name)
        cells = [escape(name), _number(base)]
        for run in runs[1:]:
            value = run.figures.get(name)
            cells += [_number(value), _ratio(name, base, value)]
        lines.append(cells)
    return table(head, lines, escaped=True)


def _ratio(name: str, base: float | None, value: float | None) -> str:
    if base is None or value is None or base == 0:
        return "-"
    ratio = value / base
    better = direction(name) * (ratio - 1)
    kind = "better" if better > 0.02 else "worse" if better < -0.02 else ""
    return f'<span class="{kind}">{ratio:.2f}</span>'


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]], *, escaped: bool = False) -> str:
    """An HTML table; cells of lines are text unless `escaped`."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{c if escaped else escape(c)}</td>" for c in line) + "</tr>"
        for line in lines
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _where(runs: Sequence[Run]) -> list[list[str]]:
    """When and on what each ran: machine, its rates, versions."""
    every = []
    for run in runs:
        machine = dict(run.content.get("machine") or {})
        versions = machine.pop("versions", {})
        every.append({"created": run.content.get("created", "-"), **machine, **versions})
    names = dict.fromkeys(name for one in every for name in one)
    return [[name, *(_short(one.get(name)) for one in every)] for name in names]


def _settings(runs: Sequence[Run]) -> str:
    """Those that differ as a table, all of them folded away below it."""
    every = [run.content.get("settings") or {} for run in runs]
    names = dict.fromkeys(name for one in every for name in one)
    lines = [[name, *(_short(one.get(name)) for one in every)] for name in names]
    differ = [line for line in lines if len(set(line[1:])) > 1]
    head = ["", *(run.name for run in runs)]
    shown = table(head, differ) if differ else ""
    return f"{shown}<details><summary>all settings</summary>{table(head, lines)}</details>"


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
