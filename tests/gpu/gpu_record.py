"""What `device_check.py` finds out, and how it checks and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from attention_cases import relative

REPEATS = 10
CHECK_SECONDS = 210.0  # checks that would start later are skipped, to leave time for speeds
START = time.monotonic()
RESULTS: dict[str, Any] = {"correct": [], "speed": [], "skipped": []}


def record(kind: str, name: str, **figures: Any) -> None:
    RESULTS[kind].append({"name": name, **figures})
    text = "  ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()
    )
    print(f"{time.monotonic() - START:6.1f}s {kind:8}{name:46}{text}", flush=True)


def check(name: str, run: Callable[[], Any], want: np.ndarray, limit: float) -> None:
    """Compare with float64, then repeat and compare bits."""
    if time.monotonic() - START > CHECK_SECONDS:
        RESULTS["skipped"].append(name)
        return
    try:
        first = np.asarray(jax.block_until_ready(run()))
        error = relative(first, want)
        same = all(np.array_equal(first, np.asarray(run())) for _ in range(REPEATS))
        record("correct", name, error=error, same_bits=same, ok=bool(error < limit and same))
    except Exception as e:  # noqa: BLE001 - one broken kernel must not hide the others
        record("correct", name, ok=False, failure=f"{type(e).__name__}: {str(e)[:300]}")


def timed(run: Callable[..., Any], *args: Any, loops: int = 20) -> float:
    """Median seconds of a call, launched back to back in groups of `loops`."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        out = None
        for _ in range(loops):
            out = run(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / loops)
    return float(np.median(times))


def speed(name: str, measure: Callable[[], dict[str, Any]]) -> None:
    try:
        record("speed", name, **measure())
    except Exception as e:  # noqa: BLE001 - as in check
        record("speed", name, failure=f"{type(e).__name__}: {str(e)[:300]}")
