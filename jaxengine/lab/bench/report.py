"""`jaxengine bench report`: result files side by side as one HTML page.

The page needs no network: figures are in it. The first file of a bench is what others of the same
bench are compared with.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxengine.lab.bench import results
from jaxengine.lab.bench.flags import new_parser
from jaxengine.lab.bench.report_page import Run, page


def main(argv: list[str]) -> int:
    """Write the page. Raises ValueError for a file that is no result."""
    args = parser().parse_args(argv)
    contents = [results.load(path) for path in args.results]
    runs = [
        Run(name, content)
        for name, content in zip(_names(args.results, args.names), contents, strict=True)
    ]
    out = Path(args.output)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(runs), encoding="utf-8")
    print(f"{out}: {len(runs)} results, {out.stat().st_size / 1024:.0f} KiB")
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("report", __doc__)
    made.add_argument("results", nargs="+", help="result files of any bench (--output-json)")
    made.add_argument("-o", "--output", default="report.html", help="the page")
    made.add_argument(
        "--names", nargs="+", default=None, help="of the results; default: the files'"
    )
    return made


def _names(paths: list[str], given: list[str] | None) -> list[str]:
    """A name for each result, no two alike."""
    if given is not None and len(given) != len(paths):
        raise ValueError(f"--names gives {len(given)} names for {len(paths)} results")
    names = given or [Path(path).stem for path in paths]
    if given is None and len(set(names)) < len(names):
        names = [str(Path(path).with_suffix("")) for path in paths]
    if len(set(names)) < len(names):
        raise ValueError("two results have the same name; --names gives others")
    return names
