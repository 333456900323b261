"""The folder of the fs tier: where files are, which temporary files are nobody's, what is oldest.

ROOT/<namespace>/<2 hex>/<2 hex>/<key hex>.kv      whole blocks only
ROOT/tmp/<random>/                                 one folder per running writer, locked by it
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from jaxengine.offload.keys import OffloadKey
from jaxengine.offload.tiers.file_ops import make_folder

SUFFIX = ".kv"
TEMPORARY = "tmp"


class StoredFile(NamedTuple):
    path: pathlib.Path
    size: int  # bytes
    used: float  # seconds since the epoch, last write or hit


def block_path(root: pathlib.Path, namespace: bytes, key: OffloadKey) -> pathlib.Path:
    name = key.hex()
    return root / namespace.hex() / name[:2] / name[2:4] / (name + SUFFIX)


def stored_files(root: pathlib.Path) -> Iterator[StoredFile]:
    """All block files of all namespaces. Files that vanish meanwhile are left out."""
    for folder, folders, names in os.walk(root):
        if pathlib.Path(folder) == root and TEMPORARY in folders:
            folders.remove(TEMPORARY)
        for name in names:
            if not name.endswith(SUFFIX):
                continue
            path = pathlib.Path(folder, name)
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            yield StoredFile(path, status.st_size, status.st_mtime)


def collect(root: pathlib.Path, limit: int) -> tuple[int, int, int]:
    """Delete the least recently used files until at most `limit` bytes are left.

    Returns (bytes left, files deleted, bytes deleted).
    """
    files = sorted(stored_files(root), key=lambda file: file.used)
    total = sum(file.size for file in files)
    deleted = freed = 0
    for file in files:
        if total - freed <= limit:
            break
        file.path.unlink(missing_ok=True)
        deleted += 1
        freed += file.size
    return total - freed, deleted, freed


class TemporaryFolder:
    """This writer's own folder for unfinished files, locked while the process lives.

    On start the folders of dead writers are removed: their locks are free.
    """

    def __init__(self, root: pathlib.Path) -> None:
        base = root / TEMPORARY
        make_folder(base)
        self.removed = _remove_dead(base)
        self.path = base / uuid.uuid4().hex
        make_folder(self.path)
        self._lock = _locked(self.path)
        self._count = 0

    def next_path(self) -> pathlib.Path:
        """A name not used before. Callers hold a lock of their own."""
        self._count += 1
        return self.path / f"{self._count}.tmp"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(folder: pathlib.Path) -> int | None:
    """The folder's lock, or None when somebody holds it or the folder is gone."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _remove_dead(base: pathlib.Path) -> int:
    removed = 0
    for folder in base.iterdir():
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            removed += 1
    return removed
