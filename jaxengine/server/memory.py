"""Memory of large requests, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

LARGE = 1 << 20  # bytes of a body whose request leaves much behind


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None where there is no such function."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def give_back() -> None:
    """Return what was freed. The C library keeps it for itself otherwise: after one text of 10 MB a
    server would stay several hundred MiB larger. Takes milliseconds, without the GIL."""
    trim = _trim()
    if trim is not None:
        trim(0)
