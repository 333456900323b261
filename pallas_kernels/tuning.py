"""Tables of configurations: configs/<device>/<op>.json.

An entry is {"key": {...}, "config": {...}, "us": measured microseconds or null, "aot": figures,
"versions": {...}}. `jaxengine.lab.aot.tune` writes the tables.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


def nearest(entries: list[Entry], key: dict[str, Any]) -> dict[str, Any] | None:
    """Config of the entry that agrees with `key` in everything but numbers called *_bucket, and
    is nearest in those; None if none agrees. Of equals the first, which is the fastest."""
    exact = {k: v for k, v in key.items() if not k.endswith("_bucket")}
    best: tuple[float, dict[str, Any]] | None = None
    for entry in entries:
        if any(entry["key"].get(k) != v for k, v in exact.items()):
            continue
        far = 0.0
        for name in key.keys() - exact.keys():
            a, b = max(key[name], 1), max(entry["key"].get(name, 1), 1)
            far += max(a / b, b / a)
        if best is None or far < best[0]:
            best = far, entry["config"]
    return None if best is None else best[1]


@functools.cache
def load(folder: str, op: str) -> tuple[Entry, ...]:
    """Entries of a table; empty where there is none. Raises ValueError for a broken file."""
    path = Path(folder) / f"{op}.json"
    if not path.exists():
        return ()
    try:
        table = json.loads(path.read_text())
        return tuple(table["entries"])
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is no table of configurations: {e}") from e


def measured(op: str, key: dict[str, Any]) -> dict[str, Any] | None:
    """Config that a GPU measured as the fastest for the nearest shape; None where none has been.
    Entries that only compiled are no better than the ops' own choice."""
    folder = Path(__file__).resolve().parents[1] / "configs" / "h200"
    timed = [e for e in load(str(folder), op) if e["us"] is not None]
    return nearest(sorted(timed, key=lambda e: e["us"]), key)
