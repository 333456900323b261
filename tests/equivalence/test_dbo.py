"""Case B74: dual-batch overlap never changes a token, whatever the split falls on; and what is
counted of it is what happened."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from testdata import child_environment

HERE = pathlib.Path(__file__).parent


def run_child(script: str) -> Any:
    # Compiling is what takes time here.
    env = child_environment(XLA_FLAGS="--xla_backend_optimization_level=0")
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        capture_output=True, text=True, timeout=590, cwd=HERE, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_b74_halves_change_nothing() -> None:
    found = run_child("dbo_runs.py")
    assert found["equal"] == [True, True]
    always, sometimes = found["figures"]["2"], found["figures"]["5"]
    assert always["dbo_steps"] > sometimes["dbo_steps"] > 0
    # One token cannot be split, and a shard with nothing to do keeps all from splitting.
    assert always["dbo_off_below_threshold"] > 0
    assert sometimes["dbo_off_below_threshold"] > always["dbo_off_below_threshold"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_with_drafts_split_above_the_threshold_only() -> None:
    """Of one row with three drafts 4 tokens are less than 8, of two rows 8 are not. Tokens of
    experts are counted in halves as in whole steps."""
    found = run_child("dbo_drafts_runs.py")
    off, on = found["off"], found["on"]
    assert on["ids"] == off["ids"] and off["split"] == []
    assert on["split"] == [8, 32]  # two rows of drafts, and the mixed step
    stats = on["stats"]
    steps = {name: n for name, n in stats.items() if name.startswith("bucket_")}
    split = steps["bucket_verify_8_2"] + steps["bucket_mixed_32_2"]
    assert stats["dbo_steps"] == split and steps["bucket_verify_4_1"] > 0
    assert stats["dbo_off_below_threshold"] == sum(steps.values()) - split
    assert on["load"] == off["load"] and sum(on["load"][0]) > 0
    assert len({sum(layer) for layer in on["load"]}) == 1  # every token goes through every layer
