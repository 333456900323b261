"""Expert parallelism: 8 host devices in a process of their own, against a dense oracle."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from jaxengine.parallel import exchange
from jaxengine.parallel.capacity import capacity, visit_probability

pytestmark = pytest.mark.timeout(900)  # seconds alone, minutes on a machine that is busy
HERE = pathlib.Path(__file__).resolve().parent
EXACT = (
    "allgather",
    "all_to_all",
    "two rows reserved",
    "all to one expert",
    "only padding",
    "more experts a token than a device has",
    "biased",
    "clamped",
    "replicated psum",
    "replicated all_to_all",
    "copies",
)


def run_checks(script: str) -> dict[str, Any]:
    env = dict(os.environ, JAX_PLATFORMS="cpu")
    # Compiling is what takes time here.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    env["XLA_FLAGS"] = flags
    done = subprocess.run(
        [sys.executable, str(HERE / script)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["check"]: line["value"] for line in lines}


@functools.cache
def checks() -> dict[str, Any]:
    return run_checks("exchange_checks.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_equals_the_dense_oracle(name: str) -> None:
    assert checks()[name] < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32 x, bfloat16 weights", "bfloat16 x"])
def test_narrow_weights(name: str) -> None:
    assert 1e-4 < checks()[name] < 2**-6  # a few roundings to bfloat16, of 2**-9 each


@pytest.mark.slow
def test_no_tokens_and_same_bits() -> None:
    assert checks()["no tokens"] == [0, 16]
    assert checks()["same bits"] is True


def test_reservation_is_less_than_all_where_visits_are_rare() -> None:
    rare = visit_probability(256, 4, 8)  # DeepSeek-V3 on 64 devices
    assert 0.1 < rare < 0.13
    assert 4096 * rare < capacity(4096, rare) < 1024
    assert capacity(4, rare) <= 4
    assert visit_probability(8, 8, 2) == 1.0


@pytest.mark.parametrize(
    ("how", "message"),
    [({"backend": "nvshmem"}, "backend must be one of"), ({"rows": 9}, "rows must be from 1 to 8")],
)
def test_bad_plans_are_refused(how: dict[str, Any], message: str) -> None:
    shards = exchange.ExpertShards(("x",), 8, 2)
    with pytest.raises(ValueError, match=message):
        exchange.make_plan(8, 2, 16, 4, shards, **how)
