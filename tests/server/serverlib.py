"""Start real server processes on loopback, and small HTTP helpers."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STUB = "jaxengine.engine.stub:StubEngineCore"


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def family(self) -> list[psutil.Process]:
        """The server and everything below it."""
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def engine(self) -> psutil.Process:
        """The engine process: the child that is not multiprocessing's resource tracker."""
        children = psutil.Process(self.process.pid).children()
        return next(c for c in children if "resource_tracker" not in " ".join(c.cmdline()))

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 20) -> int:
        self.process.send_signal(sig)
        return self.process.wait(timeout)


def spawn(*flags: str, core: str = STUB, step: float = 0.0) -> subprocess.Popen[str]:
    flags = flags if "--port" in flags else ("--port", "0", *flags)
    command = [sys.executable, str(HERE / "run_core.py"), core, *flags]
    env = {**os.environ, "JAXENGINE_STUB_STEP_SECONDS": str(step), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@contextlib.contextmanager
def running(
    *flags: str, core: str = STUB, step: float = 0.0, ready: bool = True
) -> Iterator[Server]:
    """A server process; with ready False it is yielded when it listens, not when it can serve."""
    process = spawn(*flags, core=core, step=step)
    lines: list[str] = []
    mark = " at http://" if ready else "listening on http://"
    url = None
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if mark in line:
            url = "http://" + line.split(mark)[1].split(";")[0].strip()
            break
    if url is None:
        process.wait(20)
        raise AssertionError("the server did not start:\n" + "\n".join(lines))
    stdout = process.stdout
    pump = threading.Thread(target=lambda: lines.extend(x.rstrip() for x in stdout), daemon=True)
    pump.start()
    server = Server(process, url, lines)
    try:
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
        pump.join(5)
        stdout.close()


def call(
    url: str, path: str, body: Any = None, headers: dict[str, str] | None = None, raw: bytes = b""
) -> tuple[int, Any, dict[str, str]]:
    """(status, JSON or text, headers). POST when there is a body."""
    data = raw or (None if body is None else json.dumps(body).encode())
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    for name, value in (headers or {}).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=200) as response:
            return response.status, _parsed(response.read()), dict(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _parsed(error.read()), dict(error.headers)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse)
    except json.JSONDecodeError:
        return body.decode()


def events(url: str, path: str, body: dict[str, Any]) -> list[str]:
    """The data of every server-sent event, after checking the grammar of the stream."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = response.read().decode()
    assert text.endswith("\n\n")
    found = text.removesuffix("\n\n").split("\n\n")
    assert all(e.startswith("data: ") and "\n" not in e for e in found)
    return [e.removeprefix("data: ") for e in found]


def chunks(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON chunks of a stream that ends with exactly one [DONE]."""
    found = events(url, path, body)
    assert found.count("[DONE]") == 1 and found[-1] == "[DONE]"
    return [json.loads(e, parse_constant=_refuse) for e in found[:-1]]


def metric(url: str, name: str, **labels: str) -> float:
    """Sum of a metric's series that carry the labels."""
    _, text, _ = call(url, "/metrics")
    wanted = [f'{k}="{v}"' for k, v in labels.items()]
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"jaxengine:{name}{{") and all(w in line for w in wanted)
    ]
    assert values, f"no metric {name}"
    return sum(values)


def eventually(check: Any, seconds: float = 5.0) -> None:
    """Wait until check() is true."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def hang_up(port: int, path: str, body: dict[str, Any], after: float, read: bool = False) -> None:
    """Send a request and close the connection `after` seconds later."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(after)
        if read:
            assert connection.recv(100)


def alive(url: str) -> bool:
    """It serves, and nothing is left running (ALIVE of the cases)."""
    status, body, _ = call(url, "/v1/completions", {"prompt": "hi", "max_tokens": 4})
    assert status == 200, body
    assert call(url, "/health")[0] == 200
    eventually(
        lambda: (
            metric(url, "num_requests_running") == 0
            and metric(url, "num_requests_waiting") == 0
            and metric(url, "kv_cache_usage_perc") == 0
        )
    )
    return True
