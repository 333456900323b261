"""Hang-ups, deaths, signals: nothing is left running, in the engine or on the machine."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from typing import Any

import psutil
import pytest
from serverlib import (
    Server,
    alive,
    call,
    chunks,
    events,
    eventually,
    hang_up,
    metric,
    running,
    spawn,
)

C, CC = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 4000, "ignore_eos": True}
USER = [{"role": "user", "content": "hi"}]


def _gone(processes: list[psutil.Process], seconds: float = 10) -> None:
    _, left = psutil.wait_procs(processes, timeout=seconds)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "path,body,sequences",
    [
        (C, {"prompt": "hi", "stream": True}, 1),
        (C, {"prompt": "hi"}, 1),
        (C, {"prompt": "hi", "n": 4, "temperature": 1}, 4),
        (C, {"prompt": list("abcde")}, 5),
        (C, {"prompt": list("abcde"), "stream": True}, 5),
        (CC, {"messages": USER, "stream": True}, 1),
        (CC, {"messages": USER, "n": 3, "temperature": 1}, 3),
    ],
    ids=str,
)
def test_hang_up_ends_the_request(
    slow_server: Server, path: str, body: dict[str, Any], sequences: int
) -> None:
    """B12: streamed or not, n > 1, lists, and what still waits (two run at a time)."""
    url = slow_server.url
    before = metric(url, "request_success_total", finished_reason="abort")
    hang_up(slow_server.port, path, body | LONG, 0.3, read=bool(body.get("stream")))
    eventually(
        lambda: metric(url, "request_success_total", finished_reason="abort") == before + sequences,
        2,
    )
    eventually(
        lambda: metric(url, "num_requests_running") + metric(url, "num_requests_waiting") == 0, 2
    )
    tokens = metric(url, "generation_tokens_total")
    time.sleep(0.1)
    assert metric(url, "generation_tokens_total") == tokens
    assert call(url, "/load")[1] == {"server_load": 0}


def test_hang_up_at_once_200_times(slow_server: Server) -> None:
    for _ in range(200):
        hang_up(slow_server.port, C, {"prompt": "hi", **LONG}, 0)
    eventually(lambda: call(slow_server.url, "/load")[1] == {"server_load": 0})
    assert alive(slow_server.url)


def test_requests_fail_alone() -> None:
    """A refused request is a 400, a broken one a 500; its neighbours never notice."""
    with running(core="faulty_cores:RequestFails", step=0.02) as up:
        status, body, _ = call(up.url, C, {"prompt": "x", "max_tokens": 17})
        assert status == 400 and "KV blocks" in body["error"]["message"]
        status, body, _ = call(up.url, C, {"prompt": "x", "max_tokens": 18})
        assert status == 500 and body["error"]["type"] == "server_error"
        status, body, _ = call(up.url, CC, {"messages": USER, "max_tokens": 18, "stream": True})
        assert status == 500
        assert call(up.url, C, {"prompt": "x", "max_tokens": 19})[0] == 500
        found = events(up.url, C, {"prompt": "x", "max_tokens": 19, "stream": True})
        assert "not numbers" in json.loads(found[-1])["error"]["message"]  # B56: then it closes
        assert sum('"error"' in e for e in found) == 1 and "[DONE]" not in found
        assert (
            call(up.url, C, {"prompt": "x", "max_tokens": 17, "n": 2, "temperature": 1})[0] == 400
        )
        assert metric(up.url, "request_success_total", finished_reason="error") >= 4
        assert alive(up.url)


@pytest.mark.parametrize("core", [pytest.param("StepFails", marks=pytest.mark.slow), "StepDies"])
def test_engine_death(core: str) -> None:
    """B46: every call ends, /health is 503 within a second, the exit code tells."""
    with running("--shutdown-timeout", "1", core=f"faulty_cores:{core}", step=0.02) as up:
        family = up.family()
        answers: list[tuple[int, Any, dict[str, str]]] = []
        bystander = threading.Thread(
            target=lambda: answers.append(call(up.url, C, {"prompt": "y", **LONG}))
        )
        bystander.start()
        eventually(lambda: metric(up.url, "num_requests_running") == 1)
        assert call(up.url, C, {"prompt": "x", "max_tokens": 13})[0] == 503
        bystander.join(5)
        assert answers[0][0] == 503 and answers[0][1]["error"]["code"] == "engine_dead"
        assert call(up.url, "/health")[0] == 503
        status, _, headers = call(up.url, C, {"prompt": "x"})
        assert status == 503 and "retry-after" in headers
        assert metric(up.url, "num_requests_running") == 0
        assert up.process.wait(15) == 1
        _gone(family)
        if core == "StepFails":
            assert any("the device is lost" in line for line in up.lines)


@pytest.mark.parametrize(
    "busy", [pytest.param(False, id="idle", marks=pytest.mark.slow), pytest.param(True, id="busy")]
)
def test_kill_9_of_the_front_leaves_nothing(busy: bool) -> None:
    """B45."""
    with running(step=0.02) as up:
        family = up.family()
        if busy:
            hang_up_later = threading.Thread(
                target=_ignore_errors, args=(up.url, {"prompt": "x", **LONG})
            )
            hang_up_later.start()
            eventually(lambda: metric(up.url, "num_requests_running") == 1)
        up.process.kill()
        _gone(family)
        if busy:
            hang_up_later.join(5)


def _ignore_errors(url: str, body: dict[str, Any]) -> None:
    try:
        call(url, C, body)
    except (OSError, http.client.HTTPException):
        return


@pytest.mark.parametrize(
    "sig", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_signal_drains_and_exits_0(sig: int) -> None:
    """What runs is finished, what is new is refused with 503, nothing stays behind."""
    with running(step=0.02) as up:
        family = up.family()
        found: list[dict[str, Any]] = []
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
        stream = threading.Thread(target=lambda: found.extend(chunks(up.url, C, body)))
        stream.start()
        eventually(lambda: metric(up.url, "num_requests_running") == 1)
        up.process.send_signal(sig)
        eventually(lambda: call(up.url, "/health")[0] == 503, 5)
        status, answer, headers = call(up.url, C, {"prompt": "x"})
        assert status == 503 and answer["error"]["code"] == "shutting_down"
        assert headers["retry-after"]
        stream.join(10)
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        assert up.process.wait(15) == 0
        _gone(family)


def test_drain_timeout_ends_streams_with_an_error() -> None:
    with running("--shutdown-timeout", "0.5", step=0.02) as up:
        found: list[str] = []
        body = {"prompt": "x", **LONG, "stream": True}
        stream = threading.Thread(target=lambda: found.extend(events(up.url, C, body)))
        stream.start()
        eventually(lambda: metric(up.url, "num_requests_running") == 1)
        assert up.stop() == 0
        stream.join(5)
        assert json.loads(found[-1])["error"]["code"] == "shutting_down"


def test_second_signal_ends_at_once() -> None:
    with running(step=0.02) as up:
        family = up.family()
        stream = threading.Thread(target=_ignore_errors, args=(up.url, {"prompt": "x", **LONG}))
        stream.start()
        eventually(lambda: metric(up.url, "num_requests_running") == 1)
        up.process.send_signal(signal.SIGTERM)
        eventually(lambda: call(up.url, "/health")[0] == 503, 1)
        began = time.monotonic()
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(5) != 0 and time.monotonic() - began < 4
        _gone(family)
        stream.join(5)


def test_stop_while_loading() -> None:
    """B46: 503 before ready. B45: a signal during the load leaves nothing."""
    with running(core="faulty_cores:SlowStart", ready=False) as up:
        eventually(lambda: len(up.family()) > 1)
        assert call(up.url, "/health")[0] == 503
        assert call(up.url, C, {"prompt": "x"})[1]["error"]["code"] == "loading"
        family = up.family()
        assert up.stop(signal.SIGINT) == 0
        _gone(family)


@pytest.mark.parametrize(
    "core,code,sentence",
    [
        (
            "StartFails",
            1,
            "jaxengine: the engine could not start: RuntimeError: no device was found",
        ),
        ("BadSetting", 2, "jaxengine: the engine could not start: --max-model-len 5 is longer"),
    ],
)
def test_failed_start_says_why(core: str, code: int, sentence: str) -> None:
    process = spawn(core=f"faulty_cores:{core}")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert sentence in output
    assert ("Traceback" in output) == (code == 1)


def test_port_in_use(server: Server) -> None:
    process = spawn("--port", str(server.port))
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "cannot listen on" in output
