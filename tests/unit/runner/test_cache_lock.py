"""One compiles, the others wait; who dies gives the lock back."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxengine.runner import cache_lock
from jaxengine.runner.cache_lock import compiling

HOLD = """
import pathlib, sys, time
from jaxengine.runner.cache_lock import compiling
with compiling(pathlib.Path(sys.argv[1]), "program"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_at_a_time(tmp_path: pathlib.Path) -> None:
    inside, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with compiling(tmp_path, "program"):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.02)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == 1 and inside == 0
    with compiling(tmp_path, "one"), compiling(tmp_path, "another"), compiling(None, "one"):
        pass


def test_a_dead_holder_holds_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    taken = threading.Event()

    def take() -> None:
        with compiling(tmp_path, "program"):
            taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not taken.wait(0.3)
    os.kill(holder.pid, signal.SIGKILL)
    assert taken.wait(10)
    thread.join(5)
    holder.wait(5)
    holder.stdout.close()

    monkeypatch.setattr(cache_lock, "_PATIENCE", 0.2)
    with compiling(tmp_path, "program"), compiling(tmp_path, "program"):
        pass  # patience has an end


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with compiling(tmp_path / "file", "program"):
        pass
