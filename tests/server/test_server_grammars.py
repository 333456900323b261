"""Structured output over HTTP, by the real engine."""

from __future__ import annotations

import concurrent.futures
import json
import time
from typing import Any

import jsonschema
import pytest
import tiny_model
from engine_server import CC, GREEDY, C, text_of
from serverlib import Server, alive, call, chunks, events, hang_up

LETTERS = [tiny_model.byte_id(c) for c in "abcdefgh "]


@pytest.fixture
def up(engine_server: Server) -> Server:
    return engine_server


def _chat(up: Server, schema: Any, **more: Any) -> tuple[int, Any, dict[str, str]]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 96}
    return call(up.url, CC, {**body, "response_format": wanted, **more})


FIXED = {"color": "chartreuse", "size": "medium", "tags": ["new", "sale"]}


def test_grammars_hold_in_a_mix(up: Server) -> None:
    """B14: constrained and free requests side by side, more than the pool holds."""
    schema = {"enum": [FIXED]}
    only = json.dumps(FIXED, separators=(",", ":"))
    free = {"prompt": "just text", "max_tokens": 12, **GREEDY}
    alone = text_of(call(up.url, C, free))

    def one(i: int) -> str:
        if i % 3 == 0:
            return text_of(call(up.url, C, free))
        tempting = only[:20] + only.replace("medium", "large")
        ask = [{"role": "user", "content": tempting}]
        return text_of(_chat(up, schema, messages=ask, temperature=1.5, seed=i, max_tokens=100))

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(one, range(12)))
    assert texts == [alone if i % 3 == 0 else only for i in range(12)]


@pytest.mark.parametrize("fields", [GREEDY, {"temperature": 1, "seed": 5}], ids=["greedy", "t1"])
def test_the_grammar_wins(up: Server, fields: dict[str, Any]) -> None:
    """B15: min_tokens, ignore_eos and logit_bias yield; contradictions are refused."""
    bias = {str(tiny_model.byte_id("t")): -100, str(tiny_model.byte_id("f")): -100}
    for more in ({"min_tokens": 64}, {"ignore_eos": True}, {"logit_bias": bias}):
        status, body, _ = _chat(up, {"type": "boolean"}, **more, **fields)
        assert status == 200, body
        choice = body["choices"][0]
        assert choice["message"]["content"] in ("true", "false"), more
        assert choice["finish_reason"] == "stop"
    status, body, _ = _chat(up, {"type": "boolean"}, allowed_token_ids=LETTERS, **fields)
    assert status == 400 and body["error"]["param"] == "allowed_token_ids"
    letter = {"allowed_token_ids": LETTERS[:1], "bad_words": ["a"]}
    status, body, _ = call(up.url, C, {"prompt": "x", **letter, **fields})
    assert status == 400 and body["error"]["param"] == "bad_words"


SCHEMAS: list[Any] = [
    {"type": "nope"},
    {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},
    {"$ref": "#/$defs/missing"},
    {"type": "string", "pattern": "("},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"enum": [2]}}, "required": ["b"]},
        ]
    },
    {"enum": []},
    {"type": "object", "required": ["ghost"], "additionalProperties": False},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2},
    {"type": ["boolean", "null"]},
    '{"type": "boolean"}',
    False,
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda v: json.dumps(v)[:40])
def test_a_schema_is_enforced_or_refused(up: Server, schema: Any) -> None:
    """B17."""
    bias = {str(tiny_model.byte_id(c)): 12 for c in '"}'}  # what is not bounded ends soon
    status, body, _ = _chat(up, schema, temperature=1, seed=1, max_tokens=120, logit_bias=bias)
    if status == 400:
        error = body["error"]
        assert error["param"] == "response_format"
        assert error["message"].startswith("response_format.json_schema.schema ")
        return
    assert status == 200, body
    assert body["choices"][0]["finish_reason"] == "stop", body
    parsed = json.loads(schema) if isinstance(schema, str) else schema
    jsonschema.validate(json.loads(body["choices"][0]["message"]["content"]), parsed)


@pytest.mark.parametrize(
    "fields,named",
    [
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object", "schema": {"type": 5}}}, "response_format"),
    ],
    ids=str,
)
def test_what_does_not_compile_is_named(up: Server, fields: dict[str, Any], named: str) -> None:
    for stream in (False, True):
        status, body, _ = call(up.url, C, {"prompt": "x", "stream": stream, **fields})
        assert status == 400 and body["error"]["param"] == named
        assert body["error"]["message"].startswith(named)
        assert "structured_outputs" not in body["error"]["message"] or "structured" in named


@pytest.mark.parametrize(
    "fields,pattern",
    [
        ({"guided_json": {"enum": [[1, 2]]}}, r"\[1,2\]"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" "y"+ "z"'}, "xy+z"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"json": '{"const": 5}'}}, "5"),
        ({"structured_outputs": {"regex": "c+d", "choice": None}}, "c+d"),
        ({"structured_outputs": {"grammar": 'root ::= "q" [0-3]'}}, "q[0-3]"),
    ],
    ids=str,
)
def test_every_door_leads_to_the_grammar(up: Server, fields: dict[str, Any], pattern: str) -> None:
    import re

    # 40 y's or c's in a row are legal: push the end
    bias = {str(tiny_model.byte_id(c)): 9 for c in "zd"}
    body = {"prompt": "x", "max_tokens": 60, "temperature": 1, "seed": 2, "logit_bias": bias}
    text = text_of(call(up.url, C, {**body, **fields}))
    assert re.fullmatch(pattern, text), text
    streamed = chunks(up.url, C, {**body, **fields})
    assert "".join(c["choices"][0]["text"] for c in streamed) == text


def test_no_whitespace_runs(up: Server) -> None:
    """B64."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"const": 1}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    bias = {str(tiny_model.byte_id(c)): 100 for c in " \n\t"} | {str(tiny_model.byte_id("]")): 50}
    status, body, _ = _chat(up, schema, logit_bias=bias, **GREEDY)
    assert status == 200 and body["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(body["choices"][0]["message"]["content"]), schema)


DETAILS: list[dict[str, Any]] = [
    {"$ref": "#/$defs/E", "$defs": {"E": {"enum": ["é", "日本", 'a"b', "\n"]}}},
    {"$ref": "#/$defs/C", "$defs": {"C": {"$ref": "#/$defs/A"}, "A": {"enum": [1, "1", None]}}},
    {"$ref": "#/$defs/C", "$defs": {"A": {"enum": [1, "1", None]}, "C": {"$ref": "#/$defs/A"}}},
    {
        "type": "object",
        "properties": {"操作": {"enum": ["開く", "閉じる"]}, "应用名": {"const": "x"}},
        "required": ["操作", "应用名"],
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("schema", DETAILS, ids=lambda v: json.dumps(v)[:60])
def test_schema_details(up: Server, schema: dict[str, Any]) -> None:
    """B65: seeded samples are all valid; keys come as given, in the schema's order."""
    status, body, _ = _chat(up, schema, n=12, temperature=1.5, seed=11)
    assert status == 200, body
    for choice in body["choices"]:
        value = json.loads(choice["message"]["content"])
        jsonschema.validate(value, schema)
        if isinstance(value, dict):
            assert list(value) == list(schema["properties"])


def _nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"} if depth == 0 else _nested(depth - 1)
    return {
        "oneOf": [
            {"type": "object", "properties": {f"k{i}": inner}, "required": [f"k{i}"]}
            for i in range(2)
        ]
    }


def test_slow_grammars_are_bounded(up: Server) -> None:
    """B63: each ends in a while, answered or refused; the others do not notice."""
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(2000)},
        "additionalProperties": False,
    }
    heavy: list[dict[str, Any]] = [
        {"guided_json": _nested(5)},
        {"guided_json": wide},
        {"guided_regex": "(a|a)*{50}"},
        {"guided_regex": "((a|b|c|d){1,500}){1,500}"},
    ]
    body = {"prompt": "x", "max_tokens": 2}
    call(up.url, C, body)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(call, up.url, C, {**body, **fields}) for fields in heavy]
        hang_up(up.port, C, {**body, "guided_regex": "((e|f|g|h){1,499}){1,499}"}, 0.2)
        slowest = 0.0
        for _ in range(5):
            began = time.monotonic()
            assert call(up.url, C, body)[0] == 200
            slowest = max(slowest, time.monotonic() - began)
        assert [a.result(60)[0] in (200, 400) for a in answers] == [True] * len(heavy)
    assert slowest < 20
    assert alive(up.url)


TOO_MUCH = {
    "guided_regex": "((a|b|c|d){1,500}){1,500}",
    "guided_grammar": "start: e\ne: e e e e | e e e | e e | /[a-z]/",
}


@pytest.mark.parametrize("field", TOO_MUCH)
def test_what_asks_too_much_later_is_the_client_s_mistake(up: Server, field: str) -> None:
    """M9, L8: it passes at the door and breaks in the middle of the text."""
    end = {str(tiny_model.byte_tokenizer().token_to_id("</s>")): -100}
    body = {"prompt": "x", "max_tokens": 200, "seed": 1, "logit_bias": end, field: TOO_MUCH[field]}
    free = {"prompt": "just text", "max_tokens": 12, **GREEDY}
    alone = text_of(call(up.url, C, free))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        hostile = pool.submit(call, up.url, C, body)
        assert text_of(call(up.url, C, free)) == alone
        status, answer, _ = hostile.result(120)
    assert status == 400 and answer["error"]["param"] == field
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(field)
    assert "make it smaller or less ambiguous" in answer["error"]["message"]
    *_, last = [e for e in events(up.url, C, body) if e != "[DONE]"]
    assert json.loads(last)["error"]["message"].startswith(field)
    assert alive(up.url)
