"""Several API processes before one set of engines."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from serverlib import Server, call, chunks, eventually, metric, running

C = "/v1/completions"
LONG = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True}
FLAGS = ["--api-server-count", "2", "--data-parallel-size", "2"]


def _apis(up: Server) -> list[psutil.Process]:
    children = psutil.Process(up.process.pid).children()
    return [c for c in children if "jaxengine::api" in " ".join(c.cmdline())]


def _gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


def _many(up: Server, body: dict[str, Any], count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, args=(up.url, C, body)) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def _ask(port: int, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody reads; closing the connection is a hang-up."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"POST {C} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def _folders(parent: Path) -> list[Path]:
    """Of sockets, in the directory for temporary files."""
    return list(parent.glob("jaxengine*"))


def test_two_processes_are_one_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both answer; metrics and load are those of both; a hang-up ends a request wherever it came
    in; what waits is bounded over both; a drain finishes what runs."""
    flags = [*FLAGS, "--max-num-seqs", "2", "--max-num-queued-reqs", "6", "--max-model-len", "8192"]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(*flags, step=0.02) as up:
        assert len(_apis(up)) == 2
        assert not _folders(tmp_path)  # whatever is killed from here on
        for _ in range(24):  # each on a connection of its own
            status, body, _ = call(up.url, C, {"prompt": "hi", "max_tokens": 2})
            assert status == 200 and body["usage"]["completion_tokens"] == 2
        assert all(any(f" api{i} jaxengine.access" in x for x in up.lines) for i in (0, 1))
        asked = [threading.Thread(target=call, args=(up.url, "/metrics")) for _ in range(24)]
        for thread in asked:  # several calls of a process at once: each has its own answer
            thread.start()
        for thread in asked:
            thread.join(20)
            assert not thread.is_alive()
        for _ in range(6):
            assert metric(up.url, "request_success_total", finished_reason="length") == 24
            assert metric(up.url, "generation_tokens_total") == 48
        assert metric(up.url, "num_kv_blocks") == 2 * 4096
        eventually(lambda: metric(up.url, "engine_steps_total") >= 48)
        for rank in (0, 1):
            body = {"prompt": "hi", "max_tokens": 2, "data_parallel_rank": rank}
            assert call(up.url, C, body)[0] == 200
        assert call(up.url, C, {"prompt": "hi", "data_parallel_rank": 2})[0] == 400
        assert call(up.url, "/reset_prefix_cache", {})[1] == {"success": True}

        before = metric(up.url, "time_to_first_token_seconds_count")
        waiting = [_ask(up.port, LONG) for _ in range(4)]
        started = before + 4
        eventually(lambda: metric(up.url, "time_to_first_token_seconds_count") == started, 15)
        eventually(lambda: metric(up.url, "num_requests_running") == 4)
        waiting += [_ask(up.port, LONG) for _ in range(6)]
        eventually(lambda: call(up.url, "/load")[1] == {"server_load": 10}, 15)
        status, body, headers = call(up.url, C, LONG)
        assert status == 503 and "requests wait already (the limit is 6)" in str(body)
        assert headers["retry-after"]
        assert metric(up.url, "admission_rejections_total") == 1
        for connection in waiting:
            connection.close()
        eventually(
            lambda: metric(up.url, "request_success_total", finished_reason="abort") == 10, 15
        )
        eventually(lambda: metric(up.url, "num_requests_running") == 0)
        eventually(lambda: call(up.url, "/load")[1] == {"server_load": 0})

        family = up.family()
        found: list[dict[str, Any]] = []
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        stream = threading.Thread(target=lambda: found.extend(chunks(up.url, C, body)))
        stream.start()
        eventually(lambda: metric(up.url, "num_requests_running") == 1)
        up.process.send_signal(signal.SIGTERM)
        stream.join(15)
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        assert up.process.wait(20) == 0
        _gone(family)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["api", "front", "engine"])
def test_a_death_ends_all(victim: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And leaves nothing (L4)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running("--api-server-count", "2", step=0.02) as up:
        family = up.family()
        threads = _many(up, LONG, 1) if victim == "engine" else []
        if victim == "api":
            _apis(up)[0].kill()
        elif victim == "front":
            up.process.kill()
        else:
            eventually(lambda: metric(up.url, "num_requests_running") == 1)
            engines = [p for p in family if "jaxengine::engine" in " ".join(p.cmdline())]
            engines[0].kill()
            eventually(lambda: call(up.url, "/health")[0] == 503, 3)
        began = time.monotonic()
        assert up.process.wait(20) == (-9 if victim == "front" else 1)
        assert time.monotonic() - began < 15
        _gone(family)
        assert not _folders(tmp_path)
        for thread in threads:
            thread.join(5)


def test_a_start_that_fails_says_so_once() -> None:
    from serverlib import spawn

    process = spawn("--api-server-count", "2", core="faulty_cores:BadSetting")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.count("--max-model-len 5 is longer") == 1
