"""Invalid requests against the real engine: route, body -> status and the field that is named.

`test_server_errors` has the sampling parameters of completions, one by one, against the stub. Here
are all routes that take a body, and what only a whole server can show: after the table the engine
is alive, nothing runs and all KV blocks are free.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_model
from serverlib import Server, alive, call, eventually, hang_up, metric, running

from jaxengine.engine.wire import DEFAULT_CORE

C, CC, R, M = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
E, T, D, N = "/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens"
F = "/fault_tolerance/apply"
USER = [{"role": "user", "content": "hi"}]
MAX_BYTES = 1 << 20
GOOD: dict[str, dict[str, Any]] = {
    C: {"prompt": "hi", "max_tokens": 2},
    CC: {"messages": USER, "max_tokens": 2},
    R: {"input": "hi", "max_output_tokens": 2},
    M: {"messages": USER, "max_tokens": 2},
    N: {"messages": USER},
    E: {"input": "hi"},
    T: {"prompt": "hi"},
    D: {"tokens": [5]},
    F: {"instruction": "retry"},
}
FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "128")
FLAGS += ("--num-gpu-blocks-override", "24", "--warmup", "lazy", "--served-model-name", "tiny")
FLAGS += ("--log-level", "warning", "--max-request-bytes", str(MAX_BYTES))
FLAGS += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model.build(tmp_path_factory.mktemp("tiny"))
    with running(model, *FLAGS, core=DEFAULT_CORE) as server:
        yield server
        assert alive(server.url)


@pytest.fixture(scope="module")
def tolerant() -> Iterator[Server]:
    with running("--enable-fault-tolerance", "--log-level", "warning") as server:
        yield server
        assert alive(server.url)


def _tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def _schema(schema: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": wanted}


def _call(arguments: Any) -> dict[str, Any]:
    used = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [used]}]}


def _item(**item: Any) -> dict[str, Any]:
    return {"input": [item]}


# fields on top of a good body; the field named
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [5]}, "messages"),
    ({"messages": [[]]}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages"),
    ({"messages": [{"role": None, "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
    ({"messages": [{"role": "user\ud800", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]}, "messages"),
    (_call("{"), "messages"),  # B22
    (_call("[1]"), "messages"),
    (_call('"null"'), "messages"),
    (_call([1]), "messages"),
    (_call("[" * 5000 + "]" * 5000), "messages"),
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": []}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 16385}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 10**400}, "top_p"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", None]}, "stop"),
    ({"stop": ["\ud800"]}, "stop"),
    ({"stop": ["s"] * 2000}, "stop"),
    ({"stop_token_ids": [tiny_model.VOCAB + 500]}, "stop_token_ids"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5.0": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 1, "99999": 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"bad_words": ["w"] * 1025}, "bad_words"),
    ({"bad_words": ["\ud800"]}, "bad_words"),
    ({"seed": 1.5}, "seed"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 10**30}, "prompt_logprobs"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"user": 5}, "user"),
    ({"data_parallel_rank": 1}, "data_parallel_rank"),
    ({"data_parallel_rank": -1}, "data_parallel_rank"),
    ({"data_parallel_rank": 10**30}, "data_parallel_rank"),
    ({"data_parallel_rank": "0"}, "data_parallel_rank"),
    ({"stream": 1}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"template_name": "x"}}, "chat_template_kwargs"),
    ({"documents": [5]}, "documents"),
    ({"tools": {}}, "tools"),
    ({"tools": [None]}, "tools"),
    (_tool(name="f\ud800"), "tools"),
    (_tool(parameters=[]), "tools"),
    (_tool(parameters={"properties": {"a": 5}}), "tools"),
    (_tool(parameters={"properties": {"a": {"type": {"x": 1}}}}), "tools"),
    (_tool(parameters={"properties": {"a": {"enum": 5}}}), "tools"),
    (_tool() | {"tool_choice": 5}, "tool_choice"),
    (_tool() | {"tool_choice": []}, "tool_choice"),
    (_tool() | {"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    (_tool() | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"response_format": 5}, "response_format"),
    ({"response_format": {"type": ["text"]}}, "response_format"),
    (_schema(5), "response_format"),
    (_schema({"type": "nope"}), "response_format"),
    (_schema({"$ref": "#/nowhere"}), "response_format"),
    (_schema({"$ref": "http://127.0.0.1:1/x"}), "response_format"),
    ({"structured_outputs": {"regex": "(" * 5000}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs"),
    ({"guided_regex": "\ud800"}, "guided_regex"),
    ({"guided_json": "[" * 3000 + "]" * 3000}, "guided_json"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [[1], "a", 5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"prompt": ["ok", "\udfff"]}, "prompt"),
    ({"prompt": ["ok", ""]}, "prompt"),
    ({"prompt": ["ok", [5] * 500]}, "prompt"),
    ({"logprobs": [1]}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"n": 16385}, "n"),
]
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input"),
    ({"input": "\ud800"}, "input"),
    (_item(role="king", content="x"), "input"),
    (_item(role=["user"], content="x"), "input"),
    (_item(role="user", content=5), "input"),
    (_item(role="user", content=[{"type": "input_image"}]), "input"),
    (_item(role="user", content=[{"type": ["input_text"]}]), "input"),
    (_item(type="function_call_output", call_id="no", output="x"), "input"),
    (_item(type="function_call_output", call_id=[], output="x"), "input"),
    (_item(type="function_call", call_id="c", name="f"), "input"),
    (_item(type="function_call", call_id="c", name="f", arguments="{"), "input"),
    (_item(type={"a": 1}), "input"),
    (_item(type="reasoning", content=5), "input"),
    ({"input": "x" * 300}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "4"}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 500}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": ["f"]}}, "tool_choice"),
    ({"tool_choice": {"type": ["function"]}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": []}]}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": ["text"]}}}, "text.format"),
    ({"text": {"verbosity": []}}, "text"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"reasoning": {"summary": []}}, "reasoning"),
    ({"include": ["all"]}, "include"),
    ({"metadata": {"k": 5}}, "metadata"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"previous_response_id": "no"}, "previous_response_id"),
    ({"background": True, "store": False}, "background"),
    ({"truncation": "some"}, "truncation"),
    ({"stream_options": {}}, "stream_options"),
    ({"conversation": "c"}, "conversation"),
    ({"data_parallel_rank": 7}, "data_parallel_rank"),
    ({"data_parallel_rank": "x"}, "data_parallel_rank"),
]
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [5]}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system"),
    ({"tools": [{"name": "f"}]}, "tools"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools"),
    ({"tools": [{"name": "f", "type": [], "input_schema": {}}]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": []}}, "tool_choice"),
    (
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": []}},
        "tool_choice",
    ),
    ({"thinking": {"type": []}}, "thinking"),
    ({"metadata": {"user_id": 5}}, "metadata"),
    ({"output_config": {"format": {"type": "x"}}}, "output_config"),
    ({"output_config": {"format": "x"}}, "output_config"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"mcp_servers": [1]}, "mcp_servers"),
    ({"context_management": {"edits": 5}}, "context_management"),
    ({"context_management": {"edits": [{"keep": []}]}}, "context_management"),
    ({"seed": "x"}, "seed"),
]
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    (N, {"messages": []}, "messages"),
    (N, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (E, {"input": None}, "input"),
    (E, {"input": []}, "input"),
    (E, {"input": ""}, "input"),
    (E, {"input": [True]}, "input"),
    (E, {"input": [[]]}, "input"),
    (E, {"input": [["a"]]}, "input"),
    (E, {"input": [10**30]}, "input"),
    (E, {"input": "\ud800"}, "input"),
    (E, {"input": ["ok", "x" * 300]}, "input"),
    (E, {"input": ["x"] * 2049}, "input"),
    (E, {"encoding_format": "hex"}, "encoding_format"),
    (E, {"dimensions": 0}, "dimensions"),
    (E, {"dimensions": 10**30}, "dimensions"),
    (E, {"pooling": "max"}, "pooling"),
    (E, {"priority": 2**70}, "priority"),
    (E, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (E, {"data_parallel_rank": 9}, "data_parallel_rank"),
    (T, {"prompt": None}, "prompt"),
    (T, {"prompt": "\ud800"}, "prompt"),
    (T, {"prompt": 5}, "prompt"),
    (T, {"messages": USER}, "prompt"),
    (T, {"prompt": None, "messages": []}, "messages"),
    (T, {"prompt": None, "messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (T, {"prompt": None, "messages": USER, "tools": [5]}, "tools"),
    (T, {"prompt": None, "messages": USER, "chat_template": "x"}, "chat_template"),
    (D, {"tokens": None}, "tokens"),
    (D, {"tokens": [-1]}, "tokens"),
    (D, {"tokens": [tiny_model.VOCAB + 500]}, "tokens"),
    (D, {"tokens": [10**30]}, "tokens"),
    (D, {"tokens": ["5"]}, "tokens"),
    (D, {"tokens": [1.5]}, "tokens"),
]
TABLE = [
    *((CC, fields, named) for fields, named in CHAT),
    *((C, fields, named) for fields, named in COMPLETION),
    *((R, fields, named) for fields, named in RESPONSES),
    *((M, fields, named) for fields, named in MESSAGES),
    *OTHERS,
]


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
        if (field, text) == ("top_k", "9" * 400) or (field, text) == ("max_tokens", "9" * 400):
            assert status == 200  # all of the vocabulary; all that fits
            continue
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
    body = {"messages": [*_call(arguments)["messages"], answer], "max_tokens": 1}
    status, found, _ = call(up.url, CC, body)
    assert status == 200, found


def test_b46_health_while_the_engine_stands_still(up: Server) -> None:
    """A hung engine shows: /health stays quick, and the steps of /metrics do not go on."""
    engine = up.engine()
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
    stream = threading.Thread(target=call, args=(up.url, C, body))
    engine.suspend()
    try:
        stream.start()
        steps = metric(up.url, "engine_steps_total")
        slowest = 0.0
        for _ in range(20):
            began = time.monotonic()
            assert call(up.url, "/health")[0] in (200, 503)
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.05)
        assert slowest < 5  # the engine stands for as long as it is suspended
        assert metric(up.url, "engine_steps_total") == steps
        assert call(up.url, "/load")[1]["server_load"] == 1
    finally:
        engine.resume()
    stream.join(60)
    assert metric(up.url, "engine_steps_total") > steps
    assert alive(up.url)


def test_b47_fifty_gone_at_once(up: Server) -> None:
    """Gauges are 0 two seconds later; the reasons of ended sequences add up."""
    before = metric(up.url, "request_success_total", finished_reason="abort")
    body = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True, "n": 4, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        gone = [pool.submit(hang_up, up.port, C, body, 0.5) for _ in range(50)]
        for one in gone:
            one.result(60)
    eventually(
        lambda: all(
            metric(up.url, name) == 0
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        ),
        2,
    )
    ended = metric(up.url, "request_success_total", finished_reason="abort") - before
    assert 0 < ended <= 200 and ended % 4 == 0
    assert alive(up.url)


def test_b48_a_big_prompt_beside_a_stream() -> None:
    """20 MB that are refused hold up neither /health nor a stream."""
    raw = json.dumps({"prompt": "word " * 4_000_000}).encode()
    with running("--max-model-len", "512", "--log-level", "warning", step=0.01) as up:
        gaps: list[float] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                began = time.monotonic()
                assert call(up.url, "/health")[0] == 200
                gaps.append(time.monotonic() - began)
                time.sleep(0.05)

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            stream = pool.submit(_longest_gap, up, 200)
            health = pool.submit(watch)
            began = time.monotonic()
            status, answer, _ = call(up.url, C, raw=raw)
            spent = time.monotonic() - began
            stop.set()
            health.result(10)
            gap = stream.result(60)
        assert status == 400 and answer["error"]["param"] == "prompt"
        figures = f"20 MB: refused after {spent:.2f} s; longest gaps: {max(gaps):.3f} s of /health"
        print(f"{figures}, {gap:.3f} s of the stream")
        # 0.2 s and 1 s on a machine that does nothing else; tokenizing it all takes over 5 s
        assert spent < 10 and max(gaps) < 1 and gap < 2, (figures, gap)
        assert alive(up.url)


def _longest_gap(up: Server, tokens: int) -> float:
    """Between the events of a stream, in seconds."""
    body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", up.port, timeout=60)
    connection.request("POST", C, json.dumps(body | {"stream_options": {"include_usage": True}}))
    longest, last, before = 0.0, time.monotonic(), b""
    answer = connection.getresponse()
    for line in answer:
        if line.startswith(b"data: {"):
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            before = line
    connection.close()
    assert json.loads(before[6:])["usage"]["completion_tokens"] == tokens
    return longest
