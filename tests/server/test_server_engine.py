"""The real engine behind the real server, on a model that starts in seconds."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
import tiny_model
import zmq
from serverlib import Server, alive, call, chunks, eventually, hang_up, metric, running

from jaxengine.engine.kv_events import END
from jaxengine.engine.wire import DEFAULT_CORE
from jaxengine.sched.kv_events import AllBlocksCleared, BlockStored, EventBatch

C, CC = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0}
LETTERS = [tiny_model.byte_id(c) for c in "abcdefgh "]


def _address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


EVENTS, REPLAY = _address(), _address()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model.build(tmp_path_factory.mktemp("tiny"))
    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256"]
    flags += ["--num-gpu-blocks-override", "24", "--scheduling-policy", "priority"]
    events = {"enable": True, "endpoint": EVENTS, "replay_endpoint": REPLAY, "topic": "kv"}
    flags += ["--kv-events-config", json.dumps(events)]
    flags += ["--warmup", "lazy", "--served-model-name", "tiny", "--log-level", "warning"]
    with running(model, *flags, core=DEFAULT_CORE) as server:
        yield server


def _text(answer: tuple[int, Any, dict[str, str]]) -> str:
    status, body, _ = answer
    assert status == 200, body
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _chat(up: Server, schema: Any, **more: Any) -> tuple[int, Any, dict[str, str]]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 96}
    return call(up.url, CC, {**body, "response_format": wanted, **more})


# -- text, usage, metrics ---------------------------------------------------------------------


def _stops(text: str) -> list[tuple[Any, str, str]]:
    """(stop, expected text, expected reason) of cases that a known text meets."""
    found = []
    for stop in (text[5:6], text[4:7], text[-1], [text[6:9], text[6:8]], ["zz", text[3:5]]):
        wanted = [stop] if isinstance(stop, str) else stop
        ends = [(text.find(w) + len(w), text.find(w), w) for w in wanted if w in text]
        first = min(ends)
        found.append((stop, text[: first[1]], first[2]))
    return found


def test_stop_strings(up: Server) -> None:
    """B06."""
    body = {"prompt": "tell", "max_tokens": 20, "allowed_token_ids": LETTERS, "seed": 7}
    text = _text(call(up.url, C, body))
    assert len(text) == 20
    for stop, expected, reason in _stops(text):
        status, whole, _ = call(up.url, C, {**body, "stop": stop})
        choice = whole["choices"][0]
        assert status == 200 and choice["text"] == expected, (stop, text)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
        found = chunks(up.url, C, {**body, "stop": stop, "stream_options": {"include_usage": True}})
        assert "".join(c["choices"][0]["text"] for c in found[:-1]) == expected
        assert found[-2]["choices"][0]["stop_reason"] == reason
        assert found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        kept = _text(call(up.url, C, {**body, "stop": stop, "include_stop_str_in_output": True}))
        assert kept == expected + reason
    # the start of a stop string that never comes is given back at the end
    almost = [text[-3:] + "!", text[:2] + "!"]
    found = chunks(up.url, C, {**body, "stop": almost})
    assert "".join(c["choices"][0]["text"] for c in found) == text
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert call(up.url, C, {**body, "stop": ""})[0] == 400
    assert _text(call(up.url, C, {**body, "stop": [f"no{i}" for i in range(20)]})) == text


def test_stop_at_the_text_of_a_special_token(up: Server) -> None:
    body = {"prompt": "x", "allowed_token_ids": [2], "ignore_eos": True, "max_tokens": 4}
    status, whole, _ = call(up.url, C, {**body, "stop": "</s>"})
    assert status == 200 and whole["choices"][0]["stop_reason"] == "</s>"
    assert whole["choices"][0]["text"] == "" and whole["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path,fields",
    [
        (C, {"prompt": "ab", "logprobs": 5, "echo": True, "top_k": 1, "temperature": 1}),
        (C, {"prompt": "ab", "logprobs": 5, "logit_bias": {"5": -100, "6": 100}}),
        (C, {"prompt": "ab", "logprobs": 5, "allowed_token_ids": LETTERS[:2]}),
        (CC, {"logprobs": True, "top_logprobs": 5, "guided_choice": ["yes"]}),
        (CC, {"logprobs": True, "top_logprobs": 5, "allowed_token_ids": LETTERS[:2]}),
    ],
    ids=lambda v: str(sorted(v)) if isinstance(v, dict) else None,
)
def test_logprobs_are_json(up: Server, path: str, fields: dict[str, Any], stream: bool) -> None:
    """B09: a strict parser reads every answer; what cannot be is finite or null."""
    body = {"max_tokens": 4, **fields}
    if path == CC:
        body["messages"] = [{"role": "user", "content": "hi"}]
    if stream:
        parts = [c["choices"][0] for c in chunks(up.url, path, body)]
    else:
        status, whole, _ = call(up.url, path, body)
        assert status == 200, whole
        parts = whole["choices"]
    if path == CC:
        entries = [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]]
        own = [e["logprob"] for e in entries]
    else:
        own = [x for p in parts for x in p["logprobs"]["token_logprobs"] if x is not None]
    assert own and all(-9999 < x <= 0 for x in own)


def test_usage_is_the_same_streamed(up: Server) -> None:
    """B30: lists, n, a stop string."""
    body = {"prompt": ["abc", "de"], "n": 3, "seed": 1, "max_tokens": 6, "stop": "q"}
    usage = call(up.url, C, body)[1]["usage"]
    assert usage["prompt_tokens"] == 5
    found = chunks(up.url, C, {**body, "stream_options": {"include_usage": True}})
    assert found[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert found[-1]["usage"]["prompt_tokens"] == 5
    ends = [c["choices"][0] for c in found[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(c["index"] for c in ends) == list(range(6))  # B56


def test_preemption_and_aborts_leave_the_metrics_right(up: Server) -> None:
    """B47, B12: gauges return to 0, reasons add up, recomputed tokens are no prefix hits."""
    success = {
        r: metric(up.url, "request_success_total", finished_reason=r) for r in ("length", "abort")
    }
    call(up.url, "/reset_prefix_cache", {})
    hits = metric(up.url, "prefix_cache_hits_total")
    before = metric(up.url, "num_preemptions_total")
    body = {"max_tokens": 90, "ignore_eos": True, "seed": 3}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        prompts = [f"{i:03d}" * 12 for i in range(6)]
        answers = list(pool.map(lambda p: call(up.url, C, {**body, "prompt": p}), prompts))
    assert [a[0] for a in answers] == [200] * 6
    assert metric(up.url, "num_preemptions_total") > before
    for _, answer, _ in answers:
        usage = answer["usage"]
        assert usage["completion_tokens"] == 90 and usage["prompt_tokens"] == 36
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert metric(up.url, "prefix_cache_hits_total") == hits
    port = up.port
    for _ in range(6):
        hang_up(port, C, {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 2}, 0.02)
    eventually(
        lambda: (
            metric(up.url, "request_success_total", finished_reason="abort")
            == success["abort"] + 12
        )
    )
    assert (
        metric(up.url, "request_success_total", finished_reason="length") == success["length"] + 6
    )
    assert alive(up.url)


# -- structured output ------------------------------------------------------------------------

FIXED = {"color": "chartreuse", "size": "medium", "tags": ["new", "sale"]}


def test_grammars_hold_in_a_mix(up: Server) -> None:
    """B14: constrained and free requests side by side, more than the pool holds."""
    schema = {"enum": [FIXED]}
    only = json.dumps(FIXED, separators=(",", ":"))
    free = {"prompt": "just text", "max_tokens": 12, **GREEDY}
    alone = _text(call(up.url, C, free))

    def one(i: int) -> str:
        if i % 3 == 0:
            return _text(call(up.url, C, free))
        tempting = only[:20] + only.replace("medium", "large")
        ask = [{"role": "user", "content": tempting}]
        return _text(_chat(up, schema, messages=ask, temperature=1.5, seed=i, max_tokens=100))

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
    text = _text(call(up.url, C, {**body, **fields}))
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


# -- priority, salt, admin --------------------------------------------------------------------


def test_cache_salt_and_reset(up: Server) -> None:
    def cached(salt: str | None) -> int:
        body = {"prompt": "salt" * 10, "max_tokens": 1, "cache_salt": salt}
        usage = call(up.url, C, body)[1]["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    eventually(lambda: call(up.url, "/reset_prefix_cache", {})[1] == {"success": True})
    assert [cached("a"), cached("a"), cached("b"), cached(None), cached("b")] == [0, 32, 0, 0, 32]
    assert call(up.url, "/reset_prefix_cache", {})[1] == {"success": True}
    assert cached("a") == 0


def test_kv_events_tell_what_is_cached(up: Server) -> None:
    call(up.url, "/reset_prefix_cache", {})
    text = "events of this prompt " * 2  # two full blocks
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.RCVTIMEO, 5000)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(REPLAY)
        batches: list[EventBatch] = []

        def read() -> list[Any]:
            """All events so far, from the first; numbers have no gaps."""
            batches.clear()
            numbers = []
            client.send_multipart([b"", bytes(8)])
            while (frames := client.recv_multipart())[1] != END:
                numbers.append(int.from_bytes(frames[1], "big"))
                batches.append(msgspec.msgpack.decode(frames[2], type=EventBatch))
            assert numbers == list(range(len(numbers)))
            return [event for batch in batches for event in batch.events]

        before = len(read())
        assert call(up.url, C, {"prompt": text, "max_tokens": 1})[0] == 200
        eventually(lambda: len(read()) > before)
        stored = [e for e in read()[before:] if isinstance(e, BlockStored)]
        ids = tiny_model.byte_tokenizer().encode(text).ids
        assert [t for e in stored for t in e.token_ids] == ids[:32]
        assert call(up.url, "/reset_prefix_cache", {})[1] == {"success": True}
        eventually(lambda: isinstance(read()[-1], AllBlocksCleared))


def test_priority_decides_who_is_next(up: Server) -> None:
    order: list[int] = []

    def one(rank: int, prompt: str, tokens: int) -> None:
        body = {"prompt": prompt, "priority": rank, "max_tokens": tokens, "ignore_eos": True}
        assert call(up.url, C, body)[0] == 200
        order.append(rank)

    assert call(up.url, "/pause?mode=keep", {})[0] == 200
    threads = [threading.Thread(target=one, args=(r, "p" * 60, 4)) for r in (9, 9, 9, 9, 5, 5, -1)]
    for i, thread in enumerate(threads):
        thread.start()
        eventually(lambda i=i: call(up.url, "/load")[1]["server_load"] == i + 1)
    assert call(up.url, "/resume", {})[0] == 200
    for thread in threads:
        thread.join(30)
    assert order.index(-1) < 4 and order[-1] == 9 and order[-2] == 9


def test_pause_wait_lets_running_requests_finish(up: Server) -> None:
    done: dict[str, float] = {}

    def one(name: str, tokens: int) -> None:
        body = {"prompt": name, "max_tokens": tokens, "ignore_eos": True}
        answer = call(up.url, C, body)
        assert answer[0] == 200 and answer[1]["usage"]["completion_tokens"] == tokens
        done[name] = time.monotonic()

    first = threading.Thread(target=one, args=("first", 200))
    first.start()
    eventually(lambda: metric(up.url, "num_requests_running") == 1)
    assert call(up.url, "/pause?mode=wait", {})[1] == {"status": "paused"}
    paused = time.monotonic()
    first.join(10)
    assert done["first"] < paused + 0.5
    assert call(up.url, "/is_paused")[1] == {"is_paused": True}
    second = threading.Thread(target=one, args=("second", 2))
    second.start()
    time.sleep(0.3)
    assert "second" not in done
    assert call(up.url, "/resume", {})[1] == {"status": "resumed"}
    second.join(10)
    assert "second" in done


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(up: Server, level: int) -> None:
    body = {"prompt": "remember me", "max_tokens": 8, **GREEDY}
    before = _text(call(up.url, C, body))
    found: list[dict[str, Any]] = []
    long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    stream = threading.Thread(target=lambda: found.extend(chunks(up.url, C, long)))
    stream.start()
    eventually(lambda: metric(up.url, "num_requests_running") == 1)
    assert call(up.url, f"/sleep?level={level}", {})[1] == {"status": "sleeping"}
    stream.join(10)
    assert found[-1]["choices"][0]["finish_reason"] == "abort"
    assert call(up.url, "/is_sleeping")[1] == {"is_sleeping": True}
    assert call(up.url, "/health")[0] == 200
    assert call(up.url, "/wake_up", {})[1] == {"status": "awake"}
    assert call(up.url, "/is_sleeping")[1] == {"is_sleeping": False}
    assert _text(call(up.url, C, body)) == before
    assert alive(up.url)


def test_admin_calls_are_checked(up: Server) -> None:
    for path, named in (("/sleep?level=3", "level"), ("/sleep?level=x", "level")):
        status, body, _ = call(up.url, path, {})
        assert status == 400 and body["error"]["param"] == named
    status, body, _ = call(up.url, "/pause?mode=now", {})
    assert status == 400 and body["error"]["param"] == "mode"
    info = call(up.url, "/server_info")[1]
    assert info["config"]["scheduler"]["scheduling_policy"] == "priority"
    assert info["engine"]["vocab_size"] == tiny_model.VOCAB and info["version"]
