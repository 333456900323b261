"""The fs tier when files, disks and processes fail: never a wrong byte, a counter each (B39,
B40)."""

from __future__ import annotations

import errno
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pytest

from jaxengine.offload.keys import make_key, namespace_key
from jaxengine.offload.tiers.file_ops import FileOps
from jaxengine.offload.tiers.fs import FsStore
from jaxengine.offload.tiers.fs_folder import stored_files
from jaxengine.offload.tiers.page_file import header_size

PAGE = 640
SPACE = namespace_key({"model": "test"})
FILE = PAGE + header_size(make_key(bytes(32), 0))


def key_of(i: int) -> bytes:
    return make_key(i.to_bytes(32, "big"), 0)


def page_of(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, PAGE, np.uint8)


def read(store: FsStore, i: int) -> bool:
    """Whether block i is there; then its bytes must be right."""
    into = np.zeros(PAGE, np.uint8)
    found = store.read([key_of(i)], [into])[0]
    assert not found or (into == page_of(i)).all(), f"block {i} came back with other bytes"
    return found


class Killed(BaseException):
    """The process is dead from here on."""


class DyingOps(FileOps):
    """Stops for ever after the n-th operation; the fatal write leaves a part of its data."""

    def __init__(self, last: int, rng: random.Random) -> None:
        self.left = last
        self.rng = rng

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in ("create", "write", "sync", "close", "rename", "mkdir", "unlink", "read"):
            return value

        def operation(*args: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if self.left == -1 and name == "write":
                    value(args[0], memoryview(args[1])[: self.rng.randrange(len(args[1]))])
                raise Killed
            if name == "sync":  # a killed process loses nothing that was written
                return None
            return value(*args)

        return operation


def run_until_killed(folder: pathlib.Path, point: int) -> int:
    """Writes, reads and deletes until the kill point, then a restart. Returns blocks found."""
    rng = random.Random(point)
    limit = 8 * FILE
    dying = FsStore(folder, SPACE, limit, ops=DyingOps(rng.randrange(80), rng))
    try:
        for _ in range(60):
            i = rng.randrange(14)
            action = rng.random()
            if action < 0.6:
                dying.write(key_of(i), page_of(i))
            elif action < 0.9:
                read(dying, i)
            else:
                dying.delete(key_of(i))
    except Killed:
        os.close(dying._tmp._lock)  # type: ignore[arg-type]  # what the system does for the dead
    else:
        dying.close()
    leftovers = list((folder / "tmp").iterdir())
    alive = FsStore(folder, SPACE, limit)
    assert alive._tmp.removed == len(leftovers)
    assert sum(file.size for file in stored_files(folder)) <= limit
    assert all(file.size == FILE for file in stored_files(folder)), "a partial file has a name"
    found = sum(read(alive, i) for i in range(14))
    assert found == len(list(stored_files(folder)))
    assert alive.counters.get("fs_damaged") == 0
    assert alive.write(key_of(99), page_of(99)) and read(alive, 99)
    alive.close()
    assert list((folder / "tmp").iterdir()) == []
    return found


@pytest.mark.parametrize("points", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_killed_between_any_two_operations(points: int) -> None:
    found = 0
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as base:
        for point in range(points):
            folder = pathlib.Path(base, str(point))
            found += run_until_killed(folder, point)
            shutil.rmtree(folder)
    assert found > 2 * points


WRITER = """
import sys
from test_offload_fs import FsStore, SPACE, key_of, page_of
store = FsStore(sys.argv[1], SPACE, 10**9)
print("up", flush=True)
i = 0
while True:
    store.write(key_of(i), page_of(i))
    i += 1
"""


def test_kill_9_and_restart(tmp_path: pathlib.Path) -> None:
    """A real process, three times on one folder."""
    total = 0
    for turn in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=pathlib.Path(__file__).resolve().parents[2],
            env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)},
        )
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        time.sleep(0.2 + 0.05 * turn)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        store = FsStore(tmp_path, SPACE, 10**9)
        files = len(list(stored_files(tmp_path)))
        assert all(read(store, i) for i in range(files)) and not read(store, files)
        assert store.counters.get("fs_damaged") == 0
        assert files >= total
        total = files
        store.close()
    assert total > 0


def test_damaged_files_are_misses_once(tmp_path: pathlib.Path) -> None:
    store = FsStore(tmp_path, SPACE, 10**6)
    for i in range(6):
        assert store.write(key_of(i), page_of(i))
    paths = [store._path(key_of(i)) for i in range(6)]
    os.truncate(paths[0], FILE - 1)
    os.truncate(paths[1], 0)
    whole = bytearray(paths[2].read_bytes())
    whole[FILE // 2] ^= 1
    paths[2].write_bytes(whole)
    paths[3].unlink()
    paths[4].unlink()
    paths[4].mkdir()
    assert [read(store, i) for i in range(6)] == [False] * 5 + [True]
    assert store.counters.get("fs_damaged") == 3
    assert store.counters.get("fs_vanished") == 1
    assert store.counters.get("fs_read_errors") == 1
    # No retry loop: what was damaged does not look present any more.
    assert store.contains([key_of(i) for i in range(6)], False) == [False] * 5 + [True]
    assert store.write(key_of(0), page_of(0)) and read(store, 0)
    store.close()


def test_files_of_other_engines_are_misses(tmp_path: pathlib.Path) -> None:
    store = FsStore(tmp_path, SPACE, 10**6)
    other = FsStore(tmp_path, namespace_key({"model": "other"}), 10**6)
    assert store.write(key_of(1), page_of(1))
    assert other.contains([key_of(1)], False) == [False] and not read(other, 1)
    target = other._path(key_of(1))
    target.parent.mkdir(parents=True)
    shutil.copy(store._path(key_of(1)), target)  # even under the other's name
    assert not read(other, 1) and other.counters.get("fs_damaged") == 1
    assert read(store, 1)
    store.close()
    other.close()


class FullDisk(FileOps):
    def __init__(self) -> None:
        self.full = True

    def write(self, file: int, data: bytes | memoryview) -> None:
        if self.full:
            os.write(file, memoryview(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, data)


def test_a_full_disk_is_counted_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    disk = FullDisk()
    store = FsStore(tmp_path, SPACE, 10**6, ops=disk)
    assert not store.write(key_of(1), page_of(1))
    assert store.counters.get("fs_disk_full") == 1 and store.total_bytes == 0
    assert list(store._tmp.path.iterdir()) == [] and not read(store, 1)
    disk.full = False
    assert store.write(key_of(1), page_of(1)) and read(store, 1)
    store.close()


def test_a_full_disk_is_one_line_in_the_log(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FsStore(tmp_path, SPACE, 10**6, ops=FullDisk())
    for i in range(50):
        assert not store.write(key_of(i), page_of(i))
    assert store.counters.get("fs_disk_full") == 50
    [line] = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in line
    store.close()


def test_damaged_files_are_one_line_in_the_log(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FsStore(tmp_path, SPACE, 10**6)
    for i in range(20):
        assert store.write(key_of(i), page_of(i))
        os.truncate(store._path(key_of(i)), 10)
    assert not any(read(store, i) for i in range(20))
    assert store.counters.get("fs_damaged") == 20 and len(caplog.records) == 1
    store.close()


def test_nobody_else_may_look(tmp_path: pathlib.Path) -> None:
    """Folders 0700 and files 0600, whatever the umask; a folder that was there stays as it is."""
    root = tmp_path / "new" / "kv"
    tmp_path.chmod(0o755)
    old = os.umask(0)
    try:
        store = FsStore(root, SPACE, 10**6)
        assert store.write(key_of(1), page_of(1))
        (store._tmp.path / "unfinished").touch(0o600)
        paths = [root.parent, root, *root.rglob("*")]
        modes = {path: path.stat().st_mode & 0o777 for path in paths}
        assert len(paths) == 9  # new, kv, namespace/xx/xx/block, tmp/random/unfinished
        assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in paths}
        assert tmp_path.stat().st_mode & 0o777 == 0o755
        store.close()
    finally:
        os.umask(old)


def test_a_file_in_the_way_of_a_folder(tmp_path: pathlib.Path) -> None:
    store = FsStore(tmp_path, SPACE, 10**6)
    (tmp_path / SPACE.hex()).touch()
    assert not store.write(key_of(1), page_of(1)) and not read(store, 1)
    assert store.counters.get("fs_write_errors") == 1 and store.total_bytes == 0
    store.close()
    with pytest.raises(OSError):
        FsStore(tmp_path / SPACE.hex(), SPACE, 10**6)


def test_a_folder_that_cannot_be_cleaned(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that went read-only: the write is dropped and counted, like any other."""

    def unlink(path: pathlib.Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    store = FsStore(tmp_path, SPACE, 2 * FILE)
    assert store.write(key_of(0), page_of(0)) and store.write(key_of(1), page_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "unlink", unlink)
        assert not store.write(key_of(2), page_of(2))
    assert store.counters.get("fs_write_errors") == 1 and store.total_bytes == 2 * FILE
    assert store.write(key_of(2), page_of(2)) and read(store, 2)
    store.close()


def test_the_limit_holds_and_the_oldest_go(tmp_path: pathlib.Path) -> None:
    limit = 20 * FILE
    store = FsStore(tmp_path, SPACE, limit)
    for i in range(60):
        assert store.write(key_of(i), page_of(i))
        path = store._path(key_of(i))
        os.utime(path, (i, i))
        if i == 10:
            os.utime(store._path(key_of(3)), (10**9, 10**9))  # used
        assert sum(file.size for file in stored_files(tmp_path)) <= limit
    assert read(store, 3) and read(store, 59) and not read(store, 0)
    assert store.counters.get("fs_evictions") >= 40
    tiny = FsStore(tmp_path / "tiny", SPACE, FILE - 1)
    assert not tiny.write(key_of(1), page_of(1)) and tiny.counters.get("fs_too_big") == 1
    store.close()
    tiny.close()


def test_two_engines_on_one_folder(tmp_path: pathlib.Path) -> None:
    """Starting the second leaves the first one's unfinished files alone."""
    first = FsStore(tmp_path, SPACE, 10**6)
    unfinished = first._tmp.next_path()
    unfinished.write_bytes(b"half")
    second = FsStore(tmp_path, SPACE, 10**6)
    assert unfinished.exists() and second._tmp.removed == 0
    assert first.write(key_of(1), page_of(1)) and second.write(key_of(1), page_of(1))
    assert read(second, 1)
    second.delete(key_of(1))
    assert not read(first, 1) and first.counters.get("fs_vanished") == 1
    first.close()
    second.close()
