"""What a client sends before its request is whole: bytes and time of it are bounded (H4, L1)."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from serverlib import Server, alive, call, eventually, running

MIB = 1 << 20


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def quick() -> Iterator[Server]:
    """A server that waits for the rest of a request for two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXENGINE_TEST_SECONDS", "2")
        with running() as server:
            yield server


def connected(server: Server) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port))
    made.settimeout(60)
    return made


def answer_of(connection: socket.socket) -> bytes:
    """All that the server says until it closes."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            said += part
    return said


def rss(server: Server) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def test_headers_without_end(up: Server) -> None:
    """100 MB of small headers on one connection: refused at 64 kB, and nothing is kept."""
    before = rss(up)
    part = b"".join(b"x-%06d: %s\r\n" % (i, b"y" * 80) for i in range(700))
    sent = 0
    with connected(up) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(HEAD)
            while sent < 100 * MIB:
                connection.sendall(part)
                sent += len(part)
        said = answer_of(connection)
    assert sent < 20 * MIB
    assert not said or said.startswith(b"HTTP/1.1 431 ")
    assert rss(up) - before < 30 * MIB
    assert alive(up.url)


def test_one_header_without_end(up: Server) -> None:
    """Its parts are put together by copying: 60 MB of them stood the loop still for seconds."""
    sent = 0
    with connected(up) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(HEAD + b"x-long: ")
            while sent < 60 * MIB:
                connection.sendall(b"y" * 65536)
                sent += 65536
        answer_of(connection)
    assert sent < 20 * MIB and alive(up.url)


@pytest.mark.parametrize("count", [1, 700])
def test_a_head_that_is_too_large_at_once(up: Server, count: int) -> None:
    value = b"y" * (70_000 // count)
    headers = b"".join(b"x-%d: %s\r\n" % (i, value) for i in range(count))
    with connected(up) as connection:
        connection.sendall(HEAD + headers + b"\r\n")
        said = answer_of(connection)
    assert said.startswith(b"HTTP/1.1 431 ") and b"head of the request is too large" in said


def test_a_large_head_and_a_body_in_one_packet(up: Server) -> None:
    body = b'{"prompt": "%s", "max_tokens": 1}' % (b"hi " * 20_000)
    with connected(up) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += b"x-long: %s\r\nContent-Length: %d\r\n\r\n" % (b"y" * 60_000, len(body))
        connection.sendall(head + body)
        said = answer_of(connection)
    assert said.startswith(b"HTTP/1.1 400 ") and b"prompt" in said  # read, and too long


def test_trailers_without_end(up: Server) -> None:
    with connected(up) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"2\r\n{}\r\n0\r\n"
            )
            for i in range(100_000):
                connection.sendall(b"x-%d: %s\r\n" % (i, b"y" * 80))
        answer_of(connection)
    assert alive(up.url)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /hea",
        HEAD,
        HEAD + b"x-long: y",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1",
    ],
    ids=["nothing", "line", "headers", "header", "body", "chunk"],
)
def test_half_a_request_is_closed(quick: Server, start: bytes) -> None:
    with connected(quick) as connection:
        connection.sendall(start)
        said = answer_of(connection)
    assert said.startswith(b"HTTP/1.1 408 ") if start else said == b""
    assert alive(quick.url)


def test_a_slow_body_may_go_on(quick: Server) -> None:
    """64 kB in the time that half of it needs at least."""
    body = b'{"prompt": "hi", "max_tokens": 1, "user": "%s"}' % (b"u" * 100_000)
    with connected(quick) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 16_384):
            connection.sendall(body[at : at + 16_384])
            time.sleep(0.5)
        said = answer_of(connection)
    assert said.startswith(b"HTTP/1.1 200 ")


def test_many_half_requests_lock_nobody_out(quick: Server) -> None:
    """More than a process usually may have files; an honest client is answered meanwhile."""
    ours = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ours[1] != resource.RLIM_INFINITY and ours[1] < 1500:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(ours[0], 1500), ours[1]))
    open_files = psutil.Process(quick.process.pid).num_fds
    before = open_files()
    halves = []
    try:
        for _ in range(1100):
            half = socket.create_connection(("127.0.0.1", quick.port))
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
            halves.append(half)
        assert call(quick.url, "/health")[0] == 200
        status, _, _ = call(quick.url, "/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert status == 200
        eventually(lambda: open_files() <= before + 2, 60)
    finally:
        for half in halves:
            half.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, ours)


@pytest.mark.parametrize("length", ["0" * 5000 + "2", "9" * 20, "\u0662", "-1", "2x"])
def test_a_length_that_is_no_number(up: Server, length: str) -> None:
    lines = len(up.lines)
    with connected(up) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n{{}}".encode())
        said = answer_of(connection)
    assert said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
    assert "Traceback" not in "".join(up.lines[lines:])
