"""Ranks that start together share the compilation cache: one compiles a program, the others wait
for it and read it. A lock is a file next to the cache, held while compiling; a process that dies
gives it back."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL = 0.05  # seconds between tries
_PATIENCE = 120.0  # seconds; then it is compiled twice rather than never


@contextlib.contextmanager
def compiling(folder: Path | None, program: str) -> Iterator[None]:
    """Hold the lock of `program` (its description, the same in every rank) in the cache's
    `folder`; None: no cache, no lock."""
    if folder is None:
        yield
        return
    locks = folder / "locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(program.encode()).hexdigest()[:32]
        file = os.open(locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # a cache that cannot be written helps nobody
        yield
        return
    try:
        _lock(file)
        yield
    finally:
        os.close(file)


def _lock(file: int) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL)
        except OSError:  # a file system without locks: compiled twice, no worse
            return
        else:
            return
