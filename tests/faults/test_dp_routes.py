"""The HTTP side of data parallel engines: orders, the choice of a rank, health and recovery."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from dp_servers import LONG, rank_processes
from serverlib import Server, call, eventually, running

C, CC = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    with running(
        "--data-parallel-size",
        "2",
        "--enable-fault-tolerance",
        "--api-key",
        "key",
        "--max-model-len",
        "8192",
        step=0.02,
    ) as server:
        yield server


KEY = {"Authorization": "Bearer key"}


def _call(up: Server, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return call(up.url, path, body, KEY | named)


def _state(up: Server, rank: int) -> str:
    status, body, _ = _call(up, "/fault_tolerance/status")
    assert status == 200
    return str(body["engines"][rank]["status"])


def test_the_routes(up: Server) -> None:
    assert call(up.url, "/fault_tolerance/status")[0] == 401
    assert call(up.url, "/fault_tolerance/apply", {"instruction": "retry"})[0] == 401
    status, body, _ = _call(up, "/fault_tolerance/status")
    assert status == 200 and body["schema_version"] == 1 and body["total_engines"] == 2
    assert [(e["id"], e["status"], e["epoch"]) for e in body["engines"]] == [
        (0, "healthy", 0),
        (1, "healthy", 0),
    ]
    for wrong, named in [
        ({}, "instruction"),
        ({"instruction": "explode"}, "instruction"),
        ({"instruction": "retry", "params": []}, "params"),
        ({"instruction": "retry", "params": {"rank": 2}}, "params"),
        ([], "instruction"),
    ]:
        status, body, _ = _call(up, "/fault_tolerance/apply", wrong)
        assert status == 400 and body["error"]["param"] == named
    status, body, _ = call(up.url, "/fault_tolerance/apply", headers=KEY, raw=b"{")
    assert status == 400 and "not valid JSON" in body["error"]["message"]
    assert _call(up, "/fault_tolerance/result/none")[0] == 404

    order = {"instruction": "retry", "params": {"rank": 0}}
    status, body, _ = _call(up, "/fault_tolerance/apply", order)
    assert status == 202 and body["request_id"] and body["message"]
    path = f"/fault_tolerance/result/{body['request_id']}"
    eventually(lambda: _call(up, path)[1]["status"] == "done")
    answer = _call(up, path)[1]
    assert answer["success"] is False and answer["results"][0]["reason"]
    entry = _call(up, "/fault_tolerance/status")[1]["engines"][0]
    assert entry["status"] == "healthy" and entry["last_ft_request_id"] == body["request_id"]
    assert entry["ft_error"] == answer["results"][0]["reason"]


def test_a_request_chooses_its_rank(up: Server) -> None:
    body = {"prompt": "hi", "max_tokens": 2}
    assert _call(up, C, body | {"data_parallel_rank": 1})[0] == 200
    assert _call(up, C, body, X_data_parallel_rank="0")[0] == 200
    for fields, header in [
        ({"data_parallel_rank": 2}, None),
        ({"data_parallel_rank": -1}, None),
        ({"data_parallel_rank": "0"}, None),
        ({"data_parallel_rank": 0}, "1"),
        ({}, "one"),
        ({}, "2"),
    ]:
        headers = {} if header is None else {"X_data_parallel_rank": header}
        status, answer, _ = _call(up, C, body | fields, **headers)
        assert status == 400 and answer["error"]["param"] == "data_parallel_rank", answer


def test_health_and_recovery_over_http(up: Server) -> None:
    assert call(up.url, "/health")[:2] == (200, {"status": "ok"})
    streams: list[list[dict[str, Any]]] = []

    def stream(rank: int) -> None:
        body = LONG | {"max_tokens": 150, "data_parallel_rank": rank, "stream": True}
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            up.url + C, data, KEY | {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            events = response.read().decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        streams.append([json.loads(e.removeprefix("data: ")) for e in events[:-1]])

    threads = [threading.Thread(target=stream, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    eventually(lambda: _call(up, "/load")[1]["server_load"] == 2)
    time.sleep(0.3)
    rank_processes(up)[1].kill()
    eventually(lambda: _state(up, 1) == "dead", 2)
    for thread in threads:
        thread.join(20)
    reasons = sorted(s[-1]["choices"][0]["finish_reason"] for s in streams)
    assert reasons == ["abort", "length"]
    assert call(up.url, "/health")[:2] == (200, {"status": "degraded"})
    assert _call(up, C, {"prompt": "x", "max_tokens": 2})[0] == 200

    rank_processes(up)[0].kill()
    eventually(lambda: _state(up, 0) == "dead", 2)
    status, body, headers = call(up.url, "/health")
    assert (status, body) == (503, {"status": "unavailable"}) and headers["retry-after"]
    assert call(up.url, "/health/live")[0] == 200
    for path, wanted in ((C, {"prompt": "x"}), (CC, {"messages": [{"role": "user"}]})):
        status, body, headers = _call(up, path, wanted)
        assert status == 503 and headers["retry-after"]
        assert body["error"]["code"] == "unavailable"

    status, body, _ = _call(up, "/fault_tolerance/apply", {"instruction": "respawn"})
    assert status == 202
    eventually(lambda: call(up.url, "/health")[:2] == (200, {"status": "ok"}), 30)
    entries = _call(up, "/fault_tolerance/status")[1]
    assert [e["epoch"] for e in entries["engines"]] == [1, 1] and len(entries["history"]) >= 6
    for rank in (0, 1):
        body = {"prompt": "x", "max_tokens": 3, "data_parallel_rank": rank}
        assert _call(up, C, body)[0] == 200

    text = _call(up, "/metrics")[1]
    for rank in (0, 1):
        for series in (
            f'engine_faults_total{{engine="{rank}",kind="ProcessDied"',
            f'engine_recoveries_total{{engine="{rank}",model_name="demo",outcome="ok"}} 1',
            f'engine_state{{engine="{rank}",model_name="demo",state="healthy"}} 1',
            f'num_requests_running{{engine="{rank}"',
        ):
            assert f"jaxengine:{series}" in text, series
    assert 'engine_unhealthy_seconds_total{engine="1"' in text
