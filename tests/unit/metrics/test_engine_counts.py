"""What the engine counts for the metrics: steps by shape, wasted rows, programs from the cache."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxengine.engine.step_counts import StepCounts
from jaxengine.sched.batch import Bucket

COMPILE = """
import jax, jax.numpy as jnp
from jaxengine.runner.cache_counts import CacheCounts
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
counts = CacheCounts()
for n in (3, 4):
    jax.jit(lambda x: x @ x + n).lower(jax.ShapeDtypeStruct((n, n), jnp.float32)).compile()
print(counts)
"""


def test_step_counts() -> None:
    counts = StepCounts()
    for bucket in (
        Bucket(8, 8, True),
        Bucket(8, 8, True),
        Bucket(64, 8, False),
        Bucket(24, 8, True, drafts=2),
    ):
        counts.submitted(bucket)
    plan: Any = SimpleNamespace(samples=np.array([True, True, False]))
    counts.reconciled(plan, 1)
    counts.reconciled(plan, 2)
    assert counts.stats() == {
        "bucket_decode_8_8": 2,
        "bucket_mixed_64_8": 1,
        "bucket_verify_24_8": 1,
        "async_wasted_rows": 1,
    }


def test_cache_counts(tmp_path: pathlib.Path) -> None:
    """The second process finds what the first compiled."""
    said = [
        subprocess.run(
            [sys.executable, "-c", COMPILE.format(folder=str(tmp_path))],
            check=True, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[3],
        ).stdout.strip()
        for _ in range(2)
    ]  # fmt: skip
    assert said == ["2 compiled, 0 from the cache", "0 compiled, 2 from the cache"]
