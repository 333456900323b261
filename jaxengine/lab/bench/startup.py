"""`jaxengine bench startup`: seconds from nothing to the first answer, by phase.

Every start is a process of its own: cold with an empty compilation cache, then warm with what the
cold one left there. With --server, `jaxengine serve` too, as its clients see it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from jaxengine.lab.bench import machine, results
from jaxengine.lab.bench.flags import add_output, new_parser, positive
from jaxengine.lab.bench.http import stream_json
from jaxengine.lab.bench.local_server import peak_rss_mib, serving

ROW_KEYS = ("start", "of")
PROMPT = list(range(1000, 1016))


def main(argv: list[str]) -> int:
    """Run the bench; prints a row a start. Raises ValueError when an engine does not start."""
    args, flags = parser().parse_known_args(argv)
    rows: list[dict[str, Any]] = []
    print(f"{'':<14}" + "".join(f"{name:>11}" for name in COLUMNS.values()))
    for of, measure in [("engine", _engine), *([("server", _server)] if args.server else [])]:
        with tempfile.TemporaryDirectory(prefix="startup-") as cache:
            words = ["--model", args.model, "--compilation-cache-dir", cache, *flags]
            rows.append({"start": "cold", "of": of} | measure(words))
            _print(rows[-1])
            warm = [measure(words) for _ in range(args.repeat)]
        medians = {name: statistics.median(one[name] for one in warm) for name in warm[0]}
        rows.append({"start": "warm", "of": of} | medians)
        _print(rows[-1])
    if args.output_json:
        shown = vars(args) | {"flags": flags}
        content = results.result("startup", shown, machine.describe(), {"rows": rows}, ROW_KEYS)
        results.save(args.output_json, content)
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("startup", __doc__, engine=True)
    add = made.add_argument
    add("--model", default="demo", help="model folder, .gguf file, hub id or demo")
    add("--repeat", type=positive, default=1, help="warm starts; medians count")
    add("--server", action="store_true", help="start jaxengine serve too")
    add_output(made)
    return made


def _engine(flags: list[str]) -> dict[str, float]:
    """One engine in a new process: startup_child.py, which knows its own phases."""
    began = time.time()
    command = [sys.executable, "-m", "jaxengine.lab.bench.startup_child", repr(began), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ValueError("the engine did not start; its message is above")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _server(flags: list[str]) -> dict[str, float]:
    """One server, until its first streamed token. It then runs until its programs are compiled."""
    began = time.perf_counter()
    with serving([*flags, "--log-level", "warning"]) as (url, process):
        ready = time.perf_counter() - began
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
        first = 0.0
        for _ in stream_json(url, "/v1/completions", body):
            first = first or time.perf_counter() - began
        _wait_idle(process.pid)
        peak = peak_rss_mib(process.pid)
    return {"ready_s": ready, "first_answer_s": first, "peak_rss_mib": peak}


def _wait_idle(pid: int, quiet: float = 3.0, limit: float = 600.0) -> None:
    """Until the process and its children have used little CPU for some seconds."""
    import psutil

    def used() -> float:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return float(sum(sum(p.cpu_times()[:2]) for p in family))

    end = time.monotonic() + limit
    before = used()
    while time.monotonic() < end:
        time.sleep(quiet)
        now = used()
        if now - before < 0.1 * quiet:
            return
        before = now


COLUMNS = {
    "import_s": "imported",
    "load_s": "load",
    "compile_s": "compile",
    "ready_s": "ready",
    "first_answer_s": "answer",
    "first_answer_cpu_s": "CPU s",
    "all_programs_s": "all there",
    "peak_rss_mib": "peak MiB",
}


def _print(row: dict[str, Any]) -> None:
    cells = "".join(f"{row[name]:>11.1f}" if name in row else f"{'':>11}" for name in COLUMNS)
    print(f"{row['start']} {row['of']:<9}{cells}", flush=True)
