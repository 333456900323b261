"""Two microbatches equal one batch, where the cut falls, and when to split."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxengine.parallel import overlap

pytestmark = pytest.mark.timeout(900)  # seconds alone, minutes on a machine that is busy
SCRIPT = pathlib.Path(__file__).resolve().parent / "overlap_checks.py"


@pytest.mark.slow
def test_halves_equal_the_whole() -> None:
    env = dict(os.environ, JAX_PLATFORMS="cpu")
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    env["XLA_FLAGS"] = flags
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    values = {line["check"]: line["value"] for line in lines}
    assert values.pop("what the layers change") > 0.3
    assert len(values) == 4 and max(values.values()) < 1e-5, values


def test_split_is_balanced_and_leaves_padding_to_the_second_half() -> None:
    for padded in (1, 2, 3, 8, 33, 512):
        for tokens in range(padded + 1):
            cut = overlap.split_tokens(tokens, padded)
            if tokens < 2:
                assert cut == 0  # a single token cannot be split
            else:
                assert 0 <= cut - (tokens - cut) <= 1 and cut < padded
    with pytest.raises(ValueError, match="num_tokens must be from 0 to 8"):
        overlap.split_tokens(9, 8)


@pytest.mark.parametrize("threshold", [0, 1, 2, 32])
def test_votes(threshold: int) -> None:
    for tokens in (0, 1, 2, 3, 31, 32, 33):
        want = tokens >= 2 and tokens >= threshold
        assert overlap.wants_halves(tokens, True, decode=threshold) is want
        assert overlap.wants_halves(tokens, False, prefill=threshold) is want
