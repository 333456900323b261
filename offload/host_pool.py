"""The bytes of the host tier: one mapping, cut into slots of equal size."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import pathlib

import numpy as np
from numpy.typing import NDArray

SHM = pathlib.Path("/dev/shm")
ALIGN = 64

Bytes = NDArray[np.uint8]


class PagePool:
    """`num_slots` slots of at least `page_bytes` bytes; `array` is [num_slots, stride] uint8.

    With a name the bytes are a shared-memory file that other processes map with `attach`; they
    outlive a crash of any process but the owner's. The owner holds a lock on the file, so the
    file of a dead owner is recognised and taken over. Not thread-safe by itself: whoever owns a
    slot (see `HostTier`) may touch its bytes.
    """

    def __init__(self, num_slots: int, page_bytes: int, name: str | None = None) -> None:
        """Raises ValueError for sizes or a name in use, OSError when memory is short."""
        self._set_sizes(num_slots, page_bytes)
        self.name = name
        self._file = -1
        size = num_slots * self.stride
        if name is None:
            self._map = mmap.mmap(-1, size)
        else:
            self._file = _create(_path(name), size)
            self._map = mmap.mmap(self._file, size)
        self._view()

    @classmethod
    def attach(cls, name: str, num_slots: int, page_bytes: int) -> PagePool:
        """Map another process's pool. Raises FileNotFoundError, or ValueError when the sizes are
        not the owner's."""
        pool = cls.__new__(cls)
        pool._set_sizes(num_slots, page_bytes)
        pool.name, pool._file = name, -1
        size = num_slots * pool.stride
        file = os.open(_path(name), os.O_RDWR)
        try:
            found = os.fstat(file).st_size
            if found != size:
                raise ValueError(f"host pool {name!r} has {found} bytes, expected {size}")
            pool._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        pool._view()
        return pool

    def _set_sizes(self, num_slots: int, page_bytes: int) -> None:
        if num_slots < 1 or page_bytes < 1:
            raise ValueError(
                f"a host pool needs at least one slot and one byte, got {num_slots} slots of "
                f"{page_bytes} bytes"
            )
        self.num_slots = num_slots
        self.page_bytes = page_bytes
        self.stride = -(-page_bytes // ALIGN) * ALIGN

    def _view(self) -> None:
        self.array: Bytes = np.frombuffer(self._map, np.uint8).reshape(self.num_slots, self.stride)

    def view(self, slot: int, num_bytes: int | None = None) -> Bytes:
        """The first `num_bytes` (default: page_bytes) of a slot, writable."""
        return self.array[slot, : self.page_bytes if num_bytes is None else num_bytes]

    def close(self) -> None:
        """Remove the name (owner only). The memory goes when the last view of it does."""
        if self._file >= 0:
            assert self.name is not None
            _path(self.name).unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def _path(name: str) -> pathlib.Path:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"host pool name must be a plain file name, got {name!r}")
    return SHM / name


def _create(path: pathlib.Path, size: int) -> int:
    """A locked file of `size` bytes that are really there: a write to missing memory would be
    SIGBUS, long after the start."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)  # what a dead owner left
        os.posix_fallocate(file, 0, size)
    except BlockingIOError:
        os.close(file)
        raise ValueError(f"host pool {path.name!r} belongs to a running process") from None
    except OSError as error:
        os.close(file)
        path.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            text = f"shared memory has no room for a host pool of {size} bytes"
            raise OSError(errno.ENOSPC, text) from error
        raise
    return file
