"""The file operations of the fs tier, in one place so that tests can make each of them fail."""

from __future__ import annotations

import os
import pathlib

from jaxengine.offload.host_pool import Bytes


class FileOps:
    """Each method is one operation of the operating system, or a short run of one kind."""

    def create(self, path: pathlib.Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, file: int, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            rest = rest[os.write(file, rest) :]

    def sync(self, file: int) -> None:
        os.fdatasync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def rename(self, source: pathlib.Path, target: pathlib.Path) -> None:
        os.rename(source, target)

    def mkdir(self, path: pathlib.Path) -> None:
        make_folder(path)

    def unlink(self, path: pathlib.Path) -> None:
        path.unlink(missing_ok=True)

    def read(self, path: pathlib.Path, header: bytearray, page: Bytes) -> bool:
        """Fill header and page from a file of exactly their size. False for another size."""
        with open(path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != len(header) + page.nbytes:
                return False
            return _fill(file.fileno(), memoryview(header)) and _fill(
                file.fileno(), memoryview(page)
            )


def make_folder(path: pathlib.Path) -> None:
    """The folder and those above it, as far as they are missing, for this user alone."""
    try:
        path.mkdir(0o700, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(0o700, exist_ok=True)


def _fill(file: int, target: memoryview) -> bool:
    while len(target):
        count = os.readv(file, [target])
        if count == 0:
            return False
        target = target[count:]
    return True
