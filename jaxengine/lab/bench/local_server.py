"""`jaxengine serve` as a child process, for benches that measure one of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_MARK = " at http://"  # of the line that serve prints when it is ready


class ServerStartError(ValueError):
    """A server ended before it was ready; it has said why."""


@contextlib.contextmanager
def serving(
    flags: Sequence[str], env: dict[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and process of a server that is ready; it is stopped afterwards.

    Raises ServerStartError.
    """
    command = [sys.executable, "-m", "jaxengine.cli.main", "serve", *flags, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    ) as process:
        assert process.stdout is not None
        try:
            line = next((x for x in process.stdout if _MARK in x), None)
            if line is None:
                raise ServerStartError(f"jaxengine serve {' '.join(flags)} did not start")
            yield "http://" + line.split(_MARK)[1].split(";")[0].strip(), process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def peak_rss_mib(pid: int) -> float:
    """Peak resident memory of a process and its children, summed, in MiB."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            status = Path(f"/proc/{process.pid}/status")
            peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
            total += int(peak[1]) * 1024 if peak else process.memory_info().rss
    return total / 2**20
