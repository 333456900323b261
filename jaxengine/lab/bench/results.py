"""A bench's result file: what ran, where, with which settings, and its figures.

{"bench": name, "created": time, "machine": {...}, "settings": {...}, figures...}. Figures are
numbers, mappings of them, or `rows`, of which `row_keys` name the fields that tell rows apart.
`jaxengine bench report` reads these files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_SECRET = ("api_key", "header")


def result(
    bench: str,
    settings: argparse.Namespace | dict[str, Any],
    machine: dict[str, Any],
    figures: dict[str, Any],
    row_keys: Sequence[str] = (),
) -> dict[str, Any]:
    """The file's content, without secrets."""
    given = settings if isinstance(settings, dict) else vars(settings)
    shown = {name: _plain(value) for name, value in given.items() if name not in _SECRET}
    return {
        "bench": bench,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "settings": shown,
        **({"row_keys": list(row_keys)} if row_keys else {}),
        **figures,
    }


def save(path: str | Path, content: dict[str, Any]) -> None:
    """Write the file, and the folders above it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: str | Path) -> dict[str, Any]:
    """A result file. Raises ValueError when it is none."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no result file {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("bench"), str):
        raise ValueError(f"{path} is no result of jaxengine bench: it has no field bench")
    return content


def _plain(value: Any) -> Any:
    """As JSON can hold it: infinities and paths as text."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | type(None)) else str(value)
