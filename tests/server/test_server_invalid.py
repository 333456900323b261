"""Invalid requests against the real engine: route, body -> status and the field that is named.

`test_server_errors` has the sampling parameters of completions, one by one, against the stub. Here
are all routes that take a body, and what only a whole server can show: after the table the engine
is alive, nothing runs and all KV blocks are free.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from invalid_bodies import CC, GOOD, MAX_BYTES, TABLE, USER, C, D, E, F, M, N, R, T, with_call
from serverlib import Server, alive, call, running


@pytest.fixture(scope="module")
def up(tiny_server: Server) -> Iterator[Server]:
    yield tiny_server
    assert alive(tiny_server.url)


@pytest.fixture(scope="module")
def tolerant() -> Iterator[Server]:
    with running("--enable-fault-tolerance", "--log-level", "warning") as server:
        yield server
        assert alive(server.url)


def _problem(url: str, path: str, fields: dict[str, Any], named: str) -> str | None:
    """What is wrong with the answer to a bad body."""
    status, body, _ = call(url, path, GOOD[path] | fields)
    found = (status, body)
    if status != 400 or body["error"]["type"] != "invalid_request_error":
        return f"not refused: {found}"
    error = body["error"]
    if not error["message"] or "\n" in error["message"] or len(error["message"]) > 500:
        return f"not one sentence: {found}"
    is_named = named in error["message"] if path in (M, N) else error["param"] == named
    return None if is_named else f"{named} is not named: {found}"


@pytest.mark.parametrize("path", [C, CC, R, M, E, "the rest"])
def test_every_bad_body_is_400_and_names_its_field(up: Server, path: str) -> None:
    rows = [row for row in TABLE if row[0] == path or (path == "the rest" and row[0] in (N, T, D))]
    wrong = [
        f"{str(fields)[:150]}: {problem}"
        for route, fields, named in rows
        if (problem := _problem(up.url, route, fields, named)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 80


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "n", "max_tokens", "seed", "top_k", "priority"]
)
def test_numbers_that_are_none(up: Server, field: str) -> None:
    """JSON's text may hold what is no number, or one that no machine has."""
    for text in ("NaN", "-Infinity", "1e999", "-1e999", "9" * 400):
        raw = f'{{"messages": {json.dumps(USER)}, "{field}": {text}}}'.encode()
        status, body, _ = call(up.url, CC, raw=raw)
        assert status == 400 and body["error"]["param"] == field, (text, body)


NOT_JSON = {
    "empty": b"",
    "cut": b'{"prompt": "hi"',
    "two": b'{"prompt": "hi"}{}',
    "no_object": b"[]",
    "text": b'"prompt"',
    "null": b"null",
    "latin-1": '{"prompt": "h\u00e9"}'.encode("latin-1"),
    "zero": b'{"prompt": "hi"}\x00',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep_object": b'{"a": ' * 50_000 + b"1" + b"}" * 50_000,
    "half_escape": b'{"prompt": "\\u12"}',
    "digits": b'{"prompt": "hi", "n": ' + b"1" * 10_000 + b"}",
}


@pytest.mark.parametrize("path", [*GOOD][:-1])
def test_what_is_not_json_is_400(up: Server, path: str) -> None:
    for name, raw in NOT_JSON.items():
        status, body = _post(up, path, raw)
        assert status == 400 and body["error"]["message"], (name, body)


def _post(
    up: Server, path: str, raw: bytes, content_type: str | None = "application/json", **more: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", up.port, timeout=60)
    headers = {**({} if content_type is None else {"Content-Type": content_type}), **more}
    connection.request("POST", path, raw, headers)
    answer = connection.getresponse()
    status, text = answer.status, answer.read()
    connection.close()
    return status, json.loads(text)


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "\u00e9;;=", "x/y"]
)
def test_any_content_type_is_read_as_json(up: Server, content_type: str | None) -> None:
    """Documented: a body is JSON, whatever its label (`curl -d` calls it a form)."""
    assert _post(up, C, json.dumps(GOOD[C]).encode(), content_type)[0] == 200
    status, body = _post(up, C, b"prompt=hi", content_type)
    assert status == 400 and "JSON" in body["error"]["message"]


@pytest.mark.parametrize("path", [*GOOD][:-1])
def test_models_and_sizes(up: Server, path: str) -> None:
    status, body, _ = call(up.url, path, GOOD[path] | {"model": "gpt-5"})
    assert status == 404, body
    assert "gpt-5" in body["error"]["message"] and body["error"]["type"] == "not_found_error"
    if path not in (M, N):
        assert (body["error"]["param"], body["error"]["code"]) == ("model", "model_not_found")
    large = {"raw": b'{"prompt": "' + b"x" * MAX_BYTES + b'"}'}
    for more in ({}, {"headers": {"Transfer-Encoding": "chunked"}}):
        status, body = _chunked(up, path, large["raw"]) if more else _post(up, path, large["raw"])
        assert status == 413 and str(MAX_BYTES) in body["error"]["message"], body


def _chunked(up: Server, path: str, raw: bytes) -> tuple[int, Any]:
    """A body whose length is not announced."""
    connection = http.client.HTTPConnection("127.0.0.1", up.port, timeout=60)
    parts = [raw[i : i + 65536] for i in range(0, len(raw), 65536)]
    connection.request("POST", path, iter(parts), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    status, text = answer.status, answer.read()
    connection.close()
    return status, json.loads(text)


ADMIN: list[tuple[str, str]] = [
    ("/pause?mode=now", "mode"),
    ("/pause?mode=", "mode"),
    ("/pause?clear_cache=maybe", "clear_cache"),
    ("/sleep?level=0", "level"),
    ("/sleep?level=x", "level"),
    ("/sleep?level=1.5", "level"),
    ("/sleep?level=" + "9" * 400, "level"),
]


def test_admin_routes_name_their_field(up: Server) -> None:
    for path, named in ADMIN:
        status, body, _ = call(up.url, path, {})
        assert status == 400 and body["error"]["param"] == named, (path, body)
    status, body, _ = call(up.url, "/start_profile", {})
    assert status == 400 and "--profiler-dir" in body["error"]["message"]
    for path in ("/v1/responses/none", "/v1/models/none", "/v1/responses/%FF%00"):
        status, body, _ = call(up.url, path)
        assert status == 404 and body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("rank", ["-1", "1", "x", "\u00b2", "9" * 30, ""])
def test_the_rank_in_a_header(up: Server, rank: str) -> None:
    status, body, _ = call(up.url, C, GOOD[C], {"X-data-parallel-rank": rank})
    assert status == 400 and body["error"]["param"] == "data_parallel_rank", body


FAULTS: list[tuple[Any, str | None]] = [
    ({}, "instruction"),
    ([], "instruction"),
    (5, "instruction"),
    ({"instruction": None}, "instruction"),
    ({"instruction": "explode"}, "instruction"),
    ({"instruction": ["retry"]}, "instruction"),
    ({"instruction": {"a": 1}}, "instruction"),
    ({"instruction": "retry", "params": []}, "params"),
    ({"instruction": "retry", "params": None}, "params"),
    ({"instruction": "retry", "params": {"rank": 5}}, "params"),
    ({"instruction": "retry", "params": {"rank": -1}}, "params"),
    ({"instruction": "retry", "params": {"rank": True}}, "params"),
    ({"instruction": "retry", "params": {"rank": "0"}}, "params"),
]


def test_orders_name_their_field(tolerant: Server) -> None:
    for order, named in FAULTS:
        status, body, _ = call(tolerant.url, F, raw=json.dumps(order).encode())
        assert status == 400 and body["error"]["param"] == named, (order, body)
    for name, raw in NOT_JSON.items():
        status, body = _post(tolerant, F, raw)
        assert status == 400 and body["error"]["message"], (name, body)
    assert call(tolerant.url, "/fault_tolerance/result/none")[0] == 404


# -- cases of the field that only the whole server shows ------------------------------------------


def _rendered(up: Server, messages: list[dict[str, Any]]) -> str:
    status, body, _ = call(up.url, T, {"messages": messages})
    assert status == 200, body
    text: str = call(up.url, D, {"tokens": body["tokens"]})[1]["prompt"]
    return text


def test_b21_no_content_is_one_thing(up: Server) -> None:
    turns: list[dict[str, Any]] = [
        {"content": None},
        {"content": ""},
        {"content": []},
        {},
        {"content": "", "tool_calls": []},
        {"content": None, "tool_calls": None},
    ]
    texts = {_rendered(up, [*USER, {"role": "assistant", **t}, *USER]) for t in turns}
    assert len(texts) == 1 and "None" not in texts.pop()
    for turn in turns:
        body = {"messages": [*USER, {"role": "assistant", **turn}, *USER], "max_tokens": 1}
        assert call(up.url, CC, body)[0] == 200


@pytest.mark.parametrize("arguments", ["", "{}", None, {}, '{"a": 1}', '{"\u00e9": "\u65e5"}'])
def test_b22_arguments_of_earlier_calls(up: Server, arguments: Any) -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    body = {"messages": [*with_call(arguments)["messages"], answer], "max_tokens": 1}
    status, found, _ = call(up.url, CC, body)
    assert status == 200, found
