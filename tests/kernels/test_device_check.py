"""The GPU script, on a machine without one: what it needs, and its checks with XLA's results."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
for name in ("msgspec", "zmq", "hypothesis", "pytest"):
    sys.modules[name] = None
sys.path.insert(0, "tests/gpu")
import numpy as np
import device_check as check
import gpu_answers as answers
import gpu_record as record
assert check.main() == 2, "there is no GPU here"
record.REPEATS = 1
check.device.device_reason = lambda: ""
check.device.choose = lambda *a, **k: False
record.CHECK_SECONDS = float("inf")
cases = answers.attention_cases()
some = ("group 7", "window 70", "sinks rows 64")
answers.attention_cases = lambda: [c for c in cases if c[0] in some]
answers.correctness()
made = record.RESULTS["correct"]
assert len(made) > 30, len(made)
sys.exit(str([c for c in made if not c["ok"]]) if not all(c["ok"] for c in made) else 0)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_checks_are_right_and_need_little() -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1500:]
