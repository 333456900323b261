"""`jaxengine bench sweep`: a bench over lists of parameters, a result file for each cell.

The plan is a YAML or JSON file:

    bench: serve                      # any bench with --output-json
    flags: {num-prompts: 100}         # the same in every cell
    lists: {request-rate: [1, 2, 4]}  # every combination is a cell
    server: {model: demo}             # flags of jaxengine serve: a server for the cells (optional)
    server-lists: {max-num-seqs: [8, 64]}

A cell that has its file is not run again; one that failed leaves a .failed.json and is tried again
next time. A table comes at the end; exit code 1 when a cell failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxengine.lab.bench import results
from jaxengine.lab.bench.benches import BENCHES
from jaxengine.lab.bench.flags import new_parser, positive
from jaxengine.lab.bench.flatten import flatten
from jaxengine.lab.bench.local_server import ServerStartError, serving

_KEYS = {"bench", "flags", "lists", "server", "server-lists"}
_COLUMNS = {
    "serve": ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "p99_e2el_ms"),
    "throughput": ("tokens_per_s",),
    "latency": ("avg_latency",),
    "startup": ("first_answer_s",),
}


@dataclass(frozen=True)
class Plan:
    """A sweep: flags as {name: value}, lists as {name: values}."""

    bench: str
    flags: dict[str, Any]
    lists: dict[str, list[Any]]
    server: dict[str, Any]
    server_lists: dict[str, list[Any]]

    @property
    def has_server(self) -> bool:
        return bool(self.server or self.server_lists)


def main(argv: list[str]) -> int:
    """Run the sweep. Raises ValueError for a plan that makes no sense."""
    args = parser().parse_args(argv)
    plan = read_plan(args.plan)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for server in combinations(plan.server_lists):
        cells = [(server, own) for own in combinations(plan.lists)]
        missing = [cell for cell in cells if not cell_file(folder, plan, *cell).exists()]
        if missing:
            _run_cells(folder, plan, server, [own for _, own in missing], args.timeout)
    columns = args.columns or _COLUMNS.get(plan.bench, ())
    failed = print_table(folder, plan, columns)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("sweep", __doc__)
    add = made.add_argument
    add("plan", help="YAML or JSON file")
    add("--output-dir", default="sweep", help="folder of the cells' files")
    add("--timeout", type=positive, default=3600, help="seconds for one cell")
    add("--columns", nargs="+", default=None, help="figures of the table; default: by bench")
    return made


def read_plan(path: str | Path) -> Plan:
    """Raises ValueError naming the file and key."""
    if not Path(path).is_file():
        raise ValueError(f"there is no plan {path}")
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or data.get("bench") not in set(BENCHES) - {"sweep", "report"}:
        raise ValueError(f"{path}: bench must name a bench that can be swept")
    if unknown := set(data) - _KEYS:
        raise ValueError(f"{path}: unknown key {sorted(unknown)[0]}; there are {', '.join(_KEYS)}")
    parts: dict[str, dict[str, Any]] = {}
    for key in ("flags", "lists", "server", "server-lists"):
        part = data.get(key) or {}
        if not isinstance(part, dict):
            raise ValueError(f"{path}: {key} must be a mapping")
        if key.endswith("lists") and not all(isinstance(v, list) and v for v in part.values()):
            raise ValueError(f"{path}: {key} must give every flag a list of values")
        parts[key.replace("-", "_")] = part
    plan = Plan(bench=data["bench"], **parts)
    if plan.has_server and plan.bench != "serve":
        raise ValueError(f"{path}: server is for bench serve")
    return plan


def combinations(lists: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every choice of one value from each list, the last list varying fastest."""
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def words(flags: dict[str, Any]) -> list[str]:
    """As on a command line: true is the flag alone, false and null leave it out, a list gives
    several words, a mapping JSON."""
    line: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        line.append("--" + str(name).lstrip("-").replace("_", "-"))
        if isinstance(value, list):
            line += [str(item) for item in value]
        elif value is not True:
            line.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return line


def cell_file(folder: Path, plan: Plan, server: dict[str, Any], own: dict[str, Any]) -> Path:
    """Named by the cell's own parameters and a digest of all that it is run with."""
    everything = [plan.bench, plan.flags, plan.server, server, own]
    digest = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:8]
    label = "-".join(f"{k}={v}" for k, v in (server | own).items())
    safe = "".join(c if c.isalnum() or c in "=.,_-" else "_" for c in label)[:120]
    return folder / f"{plan.bench}-{safe}-{digest}.json"


def _run_cells(
    folder: Path, plan: Plan, server: dict[str, Any], cells: list[dict[str, Any]], timeout: int
) -> None:
    try:
        with _server(plan, server) as more:
            for own in cells:
                path = cell_file(folder, plan, server, own)
                _run_cell(path, plan, server, own, more, timeout)
    except ServerStartError as error:  # none of its cells can run
        for own in cells:
            _fail(cell_file(folder, plan, server, own), server | own, str(error))


@contextlib.contextmanager
def _server(plan: Plan, server: dict[str, Any]) -> Iterator[list[str]]:
    """The flags that point the bench to this combination's server."""
    if not plan.has_server:
        yield []
        return
    with serving([*words(plan.server | server), "--log-level", "warning"]) as (url, _):
        yield ["--base-url", url]


def _run_cell(
    path: Path,
    plan: Plan,
    server: dict[str, Any],
    own: dict[str, Any],
    more: list[str],
    timeout: int,
) -> None:
    print(f"{plan.bench} {_shown(server | own)} ...", flush=True)
    part = path.with_suffix(".part")
    command = [sys.executable, "-m", "jaxengine.cli.main", "bench", plan.bench]
    command += [*words(plan.flags | own), *more, "--output-json", str(part)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        why = "" if done.returncode == 0 else f"exit code {done.returncode}: {_last(done)}"
    except subprocess.TimeoutExpired:
        why = f"not done after {timeout} s"
    if not why and not part.exists():
        why = f"bench {plan.bench} wrote no result"
    if why:
        part.unlink(missing_ok=True)
        _fail(path, server | own, why)
        return
    content = results.load(part)
    content["cell"] = server | own
    results.save(path, content)
    part.unlink()
    path.with_suffix(".failed.json").unlink(missing_ok=True)


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + "\n" + done.stderr).strip().splitlines()
    return " / ".join(lines[-3:])[-500:]


def _fail(path: Path, cell: dict[str, Any], why: str) -> None:
    print(f"  failed: {why}", flush=True)
    results.save(path.with_suffix(".failed.json"), {"cell": cell, "error": why})


def _shown(cell: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in cell.items())


def print_table(folder: Path, plan: Plan, columns: tuple[str, ...] | list[str]) -> int:
    """A line a cell; the number of cells without a result."""
    failed = 0
    lines: list[list[str]] = []
    for server in combinations(plan.server_lists):
        for own in combinations(plan.lists):
            path = cell_file(folder, plan, server, own)
            line = [str(value) for value in (server | own).values()]
            if path.exists():
                figures = flatten(results.load(path))
                for column in columns:
                    found = [v for name, v in figures.items() if name.split("/")[-1] == column]
                    line.append(" ".join(f"{value:.4g}" for value in found) or "-")
            else:
                failed += 1
                line += ["failed"]
            lines.append(line)
    heads = [*plan.server_lists, *plan.lists, *columns]
    rows = [heads, *lines]
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(heads))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)))
    return failed
