"""Case B74: dual-batch overlap never changes a token, whatever the split falls on."""

import json
import pathlib
import subprocess
import sys

import pytest
from testdata import child_environment

HERE = pathlib.Path(__file__).parent


@pytest.mark.timeout(600)
def test_b74_halves_change_nothing() -> None:
    # Compiling is what takes time here.
    env = child_environment(XLA_FLAGS="--xla_backend_optimization_level=0")
    done = subprocess.run(
        [sys.executable, str(HERE / "dbo_runs.py")],
        capture_output=True, text=True, timeout=590, cwd=HERE, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"] == [True, True]
    always, sometimes = found["figures"]["2"], found["figures"]["5"]
    assert always["dbo_steps"] > sometimes["dbo_steps"] > 0
    # One token cannot be split, and a shard with nothing to do keeps all from splitting.
    assert always["dbo_off_below_threshold"] > 0
    assert sometimes["dbo_off_below_threshold"] > always["dbo_off_below_threshold"]
