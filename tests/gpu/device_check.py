"""Every kernel on a real Hopper GPU: right answers, no races, and how fast. One command:

    python tests/gpu/device_check.py [OUT.json] [--seconds 330]

from the repository's root, with only jax, jaxtyping and numpy installed. Outputs are checked
against float64 on the host with NaN in all memory that nobody owns, each kernel is repeated and
its bits compared (a race shows as a changed bit), then speeds are measured beside a device copy,
cuDNN's attention and lax.ragged_dot in the same run, and decode steps of a random llama of 8B.
Writes JSON and prints a table; the exit status is 1 if any answer was wrong. Parts that do not
fit the time are named, not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels")]
# The suite's test helpers need hypothesis and pytest; the check itself uses neither.
import jax  # noqa: E402
import numpy as np  # noqa: E402
from gpu_answers import correctness  # noqa: E402
from gpu_record import RESULTS, START  # noqa: E402
from gpu_speeds import speeds  # noqa: E402

from jaxengine.pallas_kernels import device  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="check the kernels on this GPU")
    parser.add_argument("out", nargs="?", default="device_check.json")
    parser.add_argument("--seconds", type=float, default=330)
    options = parser.parse_args()
    if reason := device.device_reason():
        print(f"nothing to check: {reason}", file=sys.stderr)
        return 2
    RESULTS["device"] = jax.devices()[0].device_kind
    RESULTS["versions"] = {"jax": jax.__version__, "numpy": np.__version__}
    RESULTS["versions"]["engine"] = importlib.util.find_spec("msgspec") is not None
    correctness()
    speeds(options.seconds)
    wrong = [c["name"] for c in RESULTS["correct"] if not c["ok"]]
    RESULTS["seconds"] = time.monotonic() - START
    pathlib.Path(options.out).write_text(json.dumps(RESULTS, indent=1) + "\n")
    print(f"{len(RESULTS['correct']) - len(wrong)} right, {len(wrong)} wrong: {wrong}")
    print(f"skipped for time: {RESULTS['skipped']}; written to {options.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
