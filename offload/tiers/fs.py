"""Blocks as files: written aside, synced, renamed; checked on every read; oldest deleted first."""

from __future__ import annotations

import errno
import logging
import os
import pathlib
import threading
from collections.abc import Sequence

from jaxengine.offload.counters import Counters
from jaxengine.offload.host_pool import Bytes
from jaxengine.offload.keys import OffloadKey
from jaxengine.offload.seldom import SeldomLog
from jaxengine.offload.tiers.file_ops import FileOps
from jaxengine.offload.tiers.fs_folder import TemporaryFolder, block_path, collect, stored_files
from jaxengine.offload.tiers.page_file import PageError, check_page, header_of, header_size

log = logging.getLogger(__name__)


class FsStore:
    """A folder of blocks, shared by any number of engines and kept over restarts.

    A file is whole or not there: a crash at any moment leaves at most a temporary file, which the
    next start removes. A file that is damaged, of a wrong size or of another engine is deleted
    and counts as missing. Files of other namespaces count towards the limit, and go when oldest.
    """

    writable = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        namespace: bytes,
        limit: int,
        counters: Counters | None = None,
        ops: FileOps | None = None,
    ) -> None:
        """limit: bytes of all files. Raises ValueError for it, OSError for the folder."""
        if limit < 1:
            raise ValueError(f"fs_bytes must be at least 1, got {limit}")
        self.root = pathlib.Path(root)
        self.namespace = namespace
        self.limit = limit
        self.counters = counters or Counters()
        self._ops = ops or FileOps()
        self._seldom = SeldomLog(log)  # a full disk fails every block
        self._lock = threading.Lock()  # of the sizes below and the temporary names
        self._tmp = TemporaryFolder(self.root)
        self._total = sum(file.size for file in stored_files(self.root))
        self._since_scan = 0

    def contains(self, keys: Sequence[OffloadKey], stop_at_miss: bool) -> list[bool]:
        found: list[bool] = []
        for key in keys:
            found.append(os.path.isfile(self._path(key)))
            if stop_at_miss and not found[-1]:
                return found + [False] * (len(keys) - len(found))
        return found

    def read(self, keys: Sequence[OffloadKey], into: Sequence[Bytes]) -> list[bool]:
        return [self._read(key, page) for key, page in zip(keys, into, strict=True)]

    def _read(self, key: OffloadKey, page: Bytes) -> bool:
        path = self._path(key)
        header = bytearray(header_size(key))
        try:
            if not self._ops.read(path, header, page):
                raise PageError("truncated or of another size")
            check_page(bytes(header), self.namespace, key, page)
        except FileNotFoundError:
            self.counters.add("fs_vanished")
            return False
        except PageError as error:
            self._seldom.warning("damaged", "fs tier: %s: %s; deleted", path.name, error)
            self.counters.add("fs_damaged")
            self._discard(path)
            return False
        except OSError as error:
            self._seldom.warning("read", "fs tier: cannot read %s: %s", path.name, error)
            self.counters.add("fs_read_errors")
            return False
        self._mark_used(path)
        return True

    def write(self, key: OffloadKey, data: Bytes) -> bool:
        path = self._path(key)
        if os.path.exists(path):  # equal key, equal bytes
            self._mark_used(path)
            return True
        size = header_size(key) + data.nbytes
        try:
            if not self._reserve(size):
                self.counters.add("fs_too_big")
                return False
            try:
                self._write_file(path, header_of(self.namespace, key, data), data)
            except OSError:
                with self._lock:
                    self._total -= size
                raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self.counters.add("fs_disk_full" if full else "fs_write_errors")
            self._seldom.warning("write", "fs tier: cannot write %s: %s", path.name, error)
            return False
        return True

    def _write_file(self, path: pathlib.Path, header: bytes, data: Bytes) -> None:
        """Nobody ever sees a part of it under its name."""
        ops = self._ops
        with self._lock:
            temporary = self._tmp.next_path()
        file = ops.create(temporary)
        try:
            try:
                ops.write(file, header)
                ops.write(file, memoryview(data))
                ops.sync(file)
            finally:
                ops.close(file)
            ops.mkdir(path.parent)
            ops.rename(temporary, path)
        except OSError:
            ops.unlink(temporary)
            raise

    def delete(self, key: OffloadKey) -> None:
        self._discard(self._path(key))

    def close(self) -> None:
        self._tmp.close()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files as far as this engine knows."""
        with self._lock:
            return self._total

    def _reserve(self, size: int) -> bool:
        """Room for `size` bytes within the limit; deletes old files for it, an eighth at a time,
        and counts anew now and then, because other engines write too."""
        with self._lock:
            self._since_scan += size
            over = self._total + size > self.limit
            if size <= self.limit and (over or self._since_scan > self.limit // 8):
                target = min(self.limit - size, self.limit * 7 // 8 if over else self.limit)
                self._total, deleted, _ = collect(self.root, target)
                self.counters.add("fs_evictions", deleted)
                self._since_scan = 0
            if self._total + size > self.limit:
                return False
            self._total += size
            return True

    def _discard(self, path: pathlib.Path) -> None:
        try:
            size = path.stat().st_size
            self._ops.unlink(path)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._seldom.warning("delete", "fs tier: cannot delete %s: %s", path.name, error)
                self.counters.add("fs_delete_errors")
            return
        with self._lock:
            self._total -= size

    def _mark_used(self, path: pathlib.Path) -> None:
        try:
            os.utime(path)
        except OSError:  # read-only or gone: it only loses its place in the order
            self.counters.add("fs_touch_errors")

    def _path(self, key: OffloadKey) -> pathlib.Path:
        return block_path(self.root, self.namespace, key)
