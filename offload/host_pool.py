"""The bytes of the host tier: one mapping, cut into slots of equal size."""

from __future__ import annotations

import errno
import mmap
import os

import numpy as np
from numpy.typing import NDArray

ALIGN = 64

Bytes = NDArray[np.uint8]


class PagePool:
    """`num_slots` slots of at least `page_bytes` bytes; `array` is [num_slots, stride] uint8.

    A shared pool is a nameless memory file: other processes map it through the owner's open file
    (`address`), and it is gone when the last of them is, however they end. Not thread-safe by
    itself: whoever owns a slot (see `HostTier`) may touch its bytes.
    """

    def __init__(self, num_slots: int, page_bytes: int, shared: bool = False) -> None:
        """Raises ValueError for sizes, OSError when memory is short."""
        self._set_sizes(num_slots, page_bytes)
        self._file = -1
        size = num_slots * self.stride
        if shared:
            self._file = _create(size)
        self._map = mmap.mmap(self._file, size)
        self._view()

    @property
    def address(self) -> str:
        """Where another process of this user finds a shared pool."""
        assert self._file >= 0, "the pool is not shared"
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @classmethod
    def attach(cls, address: str, num_slots: int, page_bytes: int) -> PagePool:
        """Map another process's pool. Raises OSError when its owner is gone, or ValueError when
        the sizes are not the owner's."""
        pool = cls.__new__(cls)
        pool._set_sizes(num_slots, page_bytes)
        pool._file = -1
        size = num_slots * pool.stride
        file = os.open(address, os.O_RDWR)
        try:
            found = os.fstat(file).st_size
            if found != size:
                raise ValueError(f"the host pool has {found} bytes, expected {size}")
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
        """Nobody can attach any more. The memory goes when the last view of it does."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _create(size: int) -> int:
    """A memory file of `size` bytes that are really there: a write to missing memory would be
    SIGBUS, long after the start."""
    file = os.memfd_create("jaxengine-kv", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.close(file)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            text = f"there is no memory for a host pool of {size} bytes"
            raise OSError(error.errno, text) from error
        raise
    return file
