"""A server for the pages' commands and the files of configs/: the real one, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from pages import ROOT

COMMAND = [sys.executable, "-m", "jaxengine.cli.main"]


def environment(**more: str) -> dict[str, str]:
    """The caller's, with this checkout's code first."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(
    words: Sequence[str], folder: pathlib.Path, seconds: float = 900, **environ: str
) -> Iterator[str]:
    """`jaxengine serve WORDS` run in `folder`; its address once it answers on /health."""
    port = free_port()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", *words, "--port", str(port)],
            cwd=folder,
            env=environment(**environ),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, seconds, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, seconds: float, log: Any) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and process.poll() is None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(url + "/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.2)
    log.seek(0)
    raise AssertionError("the server did not start:\n" + log.read()[-4000:])


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a POST of JSON; an error status raises."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
