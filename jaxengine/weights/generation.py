"""What generation_config.json says of sampling and of ends, as far as it can be used.

The file is a set of defaults that somebody else wrote: a value that no request could have is left
out with a warning that names the file and the field.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from jaxengine.models.values import integer

log = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
# The ranges of requests (`validation`): lowest, highest.
_NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (5e-324, 1.0),  # above 0
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-30, 1e30),
}
_COUNTS = {"top_k": -1, "max_new_tokens": 1}  # lowest
_ABSENT = (2**32 - 1, 2**64 - 1)  # -1 in GGUF's unsigned numbers


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """A model's files are read several times in a process, its faults are told once."""
    log.warning("%s", message)


def usable_defaults(given: Mapping[str, Any], where: object) -> dict[str, Any]:
    """`given` without the sampling defaults that no request could have; whole numbers as int."""
    out = dict(given)
    for key in (*_NUMBERS, *_COUNTS):
        value = out.get(key)
        if value is None:
            continue
        read = _number(value, *_NUMBERS[key]) if key in _NUMBERS else integer(value)
        if read is None or (key in _COUNTS and not _COUNTS[key] <= read < 2**63):
            warn_once(f"{where}: {key} {_show(value)} cannot be a default, and is ignored")
            del out[key]
        else:
            out[key] = read
    return out


def token_ids(
    config: Mapping[str, Any], key: str, vocab_size: int | None, where: object
) -> list[int]:
    """The token ids under `key`, each once: one, a list, or none (null, -1).

    What is no token of the vocabulary is left out with a warning that names file and key.
    """
    value = config.get(key)
    ids: list[int] = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, str) and entry.isdecimal() and len(entry) < 20:
            found: int | None = int(entry)
        else:
            found = integer(entry)
        if entry is None or (found is not None and (found < 0 or found in _ABSENT)):
            continue
        if found is None:
            warn_once(f"{where}: {key} holds {_show(entry)}, which is no token id, and is ignored")
        elif vocab_size is not None and found >= vocab_size:
            outside = f"{found}, which is not in the vocabulary of {vocab_size}"
            warn_once(f"{where}: {key} holds {outside}, and is ignored")
        else:
            ids.append(found)
    return list(dict.fromkeys(ids))


def _number(value: object, low: float, high: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if low <= value <= high else None  # NaN is in no range


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
