"""Measuring how many tokens each expert gets, for `eplb.place`.

An engine with `record_expert_load` set counts while it serves and writes a JSON file; another
start reads it. Counting calls back to the host in every layer, so it costs speed while it is on.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WRITE_SECONDS = 5.0

_lock = threading.Lock()
_counts: NDArray[np.int64] | None = None
_path: Path | None = None
_written = 0.0


def start(path: str, num_layers: int, num_experts: int) -> None:
    """Count from now on. The file is written every few seconds and by `flush`."""
    global _counts, _path, _written
    with _lock:
        _counts = np.zeros((num_layers, num_experts), np.int64)
        _path, _written = Path(path), time.monotonic()


def record(layer: Any, ids: Any) -> None:
    """Called by programs: experts of a layer's tokens; padding is -1."""
    global _written
    with _lock:
        if _counts is None:
            return
        found = np.asarray(ids).reshape(-1)
        _counts[int(layer)] += np.bincount(found[found >= 0], minlength=_counts.shape[1])
        if time.monotonic() - _written < WRITE_SECONDS:
            return
        _written = time.monotonic()
    flush()


def flush() -> None:
    """Write the file, if anything is being counted."""
    with _lock:
        if _counts is None or _path is None:
            return
        text = json.dumps({"tokens": _counts.tolist()})
        partial = _path.with_name(_path.name + ".partial")
        partial.write_text(text)
        partial.replace(_path)


def read(path: str, num_layers: int, num_experts: int) -> NDArray[np.float64]:
    """[L, E] tokens by layer and expert. Raises ValueError naming the file."""
    try:
        tokens = json.loads(Path(path).read_text())["tokens"]
        load = np.asarray(tokens, np.float64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"eplb_load {path} cannot be read: {error}") from error
    if load.shape != (num_layers, num_experts):
        raise ValueError(
            f"eplb_load {path} counts {load.shape} layers and experts, the model has "
            f"({num_layers}, {num_experts})"
        )
    if not load.any():
        raise ValueError(
            f"eplb_load {path} counts no token of any expert; record it (record_expert_load) while "
            "requests are served"
        )
    return load
