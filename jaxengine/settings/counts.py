"""Counts as people write them: `--max-model-len 32k`. The units are those of vLLM's flags."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

COUNTS = ("--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory-bytes")
AUTO = ("--max-model-len",)  # -1 in numbers: what ModelConfig takes for "not set"

_UNITS = {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}


def read_count(flag: str, text: str) -> int:
    """`32k` is 32,000 and `32K` 32,768; m, g, t and M, G, T go on alike. Fractions are for the
    units of 1000: 25.6k. `auto`, where the flag has it, is -1.

    Raises ValueError naming the flag.
    """
    if text == "auto" and flag in AUTO:
        return -1
    found = re.fullmatch(r"(-?\d+)|(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", text)
    if found is not None:
        plain, decimal, small, whole, large = found.groups()
        if plain is not None:
            return int(plain)
        value = Decimal(decimal or whole) * _UNITS[small or large]
        if value == int(value):
            return int(value)
    auto = ", or auto" if flag in AUTO else ""
    raise ValueError(
        f"{flag} {text} is no whole number: write 25600, 25.6k (thousands: k, m, g, t) "
        f"or 25K (1024s: K, M, G, T){auto}"
    )


def count_words(argv: list[str]) -> list[str]:
    """A command line with the values of such flags as plain numbers. Raises ValueError."""
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag not in COUNTS:
            words.append(word)
            continue
        if not equals:
            value = next(rest, "")
        if value and not value.startswith("--"):
            words.append(f"{name}={read_count(flag, value)}")
        else:  # the parser says what is missing
            words += [word, value] if value else [word]
    return words


def count_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """The keys of a YAML file, treated as `count_words` treats flags."""
    return {name: _count_value(name, value) for name, value in settings.items()}


def _count_value(name: str, value: Any) -> Any:
    flag = "--" + name.replace("_", "-")
    return read_count(flag, value) if flag in COUNTS and isinstance(value, str) else value
