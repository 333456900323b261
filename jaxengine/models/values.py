"""Numbers and switches in every legal spelling of a configuration or of GGUF metadata.

A whole number may be written as 4096.0, a switch as 1, and what is one number in most files may be
a list with an entry for each layer. They are read as what they mean; None says "not this kind".
"""

from __future__ import annotations

from typing import Any

from jaxengine.models.errors import UnsupportedModelError


def integer(value: object) -> int | None:
    """A whole number; None for anything else, also for true and false."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def switch(value: object) -> bool | None:
    """True or false, also as 1 or 0; None for anything else."""
    return bool(value) if isinstance(value, bool) or integer(value) in (0, 1) else None


def one_for_all(value: Any, layers: int | None, name: str) -> Any:
    """What a list repeats for every layer (or holds alone); a value that is no list as it is.

    Raises UnsupportedModelError, naming the field, for entries that differ or do not fit.
    """
    if not isinstance(value, list):
        return value
    if any(entry != value[0] for entry in value):
        raise UnsupportedModelError(f"{name} has values that differ by layer: {_short(value)}")
    if len(value) not in (1, layers):
        raise UnsupportedModelError(f"{name} has {len(value)} entries for {layers} layers")
    return value[0]


def _short(value: list[Any]) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
