"""The official client, the grammar of streams, usage, log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from serverlib import Server, alive, call, chunks, events, metric

C, CC = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_client_completion(client: Any) -> None:
    whole = client.completions.create(model="demo", prompt="hi", max_tokens=8)
    assert whole.choices[0].finish_reason == "length" and whole.choices[0].text
    assert whole.usage.completion_tokens == 8
    streamed = client.completions.create(model="demo", prompt="hi", max_tokens=8, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == whole.choices[0].text


def test_client_chat(client: Any) -> None:
    ask = {"model": "demo", "messages": USER, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.role == "assistant"
    assert len(whole.choices[0].logprobs.content) == 8
    assert all(len(t.top_logprobs) == 2 for t in whole.choices[0].logprobs.content)
    streamed = client.chat.completions.create(**ask, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in streamed)
    assert text == whole.choices[0].message.content


def test_client_sees_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="hi", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="hi")
    assert client.models.list().data[0].id == "demo"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 9},
        {"max_tokens": 40, "stop": ["zzz"]},
        {"max_tokens": 9, "n": 2, "temperature": 1},
        {"max_tokens": 9, "stop_token_ids": [1047 + 31 * 4]},
        {"max_tokens": 9, "allowed_token_ids": [2]},  # EOS first: an empty answer
    ],
    ids=str,
)
def test_chat_stream_grammar(server: Server, fields: dict[str, Any]) -> None:
    """B56: role first, one finish_reason a choice, one [DONE]; the deltas are the answer."""
    body = {"messages": USER, **fields}
    whole = call(server.url, CC, body)[1]
    found = chunks(server.url, CC, body)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in found}) == 1
    assert all("usage" not in c for c in found)  # B30: only when asked
    for choice in whole["choices"]:
        mine = [d for c in found for d in c["choices"] if d["index"] == choice["index"]]
        assert all("finish_reason" in d for d in mine)
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in d["delta"] for d in mine[1:])
        assert [d["finish_reason"] for d in mine if d["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["finish_reason"]
        assert "".join(d["delta"]["content"] for d in mine) == choice["message"]["content"]


@pytest.mark.parametrize(("path", "prefix"), [(C, "cmpl-"), (CC, "chatcmpl-")])
def test_the_body_may_name_the_request(server: Server, path: str, prefix: str) -> None:
    """The header goes first; both come back as X-Request-Id."""
    body = {"prompt": "hi"} if path == C else {"messages": USER}
    body |= {"max_tokens": 1, "request_id": "mine"}
    for headers, name in (({}, "mine"), ({"X-Request-Id": "other"}, "other")):
        status, answer, back = call(server.url, path, body, headers)
        assert status == 200 and answer["id"] == prefix + name
        assert {k.lower(): v for k, v in back.items()}["x-request-id"] == name
    status, answer, _ = call(server.url, path, body | {"request_id": "a b"})
    assert status == 400 and answer["error"]["param"] == "request_id"


def test_completion_stream_of_two_prompts(server: Server) -> None:
    body = {"prompt": ["a", [5, 6, 7]], "n": 2, "max_tokens": 6, "logprobs": 1, "echo": True}
    whole = call(server.url, C, body)[1]
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    found = chunks(server.url, C, body)
    for choice in whole["choices"]:
        mine = [d for c in found for d in c["choices"] if d["index"] == choice["index"]]
        assert "".join(d["text"] for d in mine) == choice["text"]
        for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [x for d in mine for x in d["logprobs"][key]] == choice["logprobs"][key]
        assert choice["logprobs"]["text_offset"][0] == 0
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_usage(server: Server) -> None:
    """B30: a prompt counts once whatever n; streamed usage only when asked, and equal."""
    body: dict[str, Any] = {"prompt": ["a b c", "d"], "n": 3, "max_tokens": 5}
    usage = call(server.url, C, body)[1]["usage"]
    assert usage["completion_tokens"] == 30
    singles = [
        call(server.url, C, {"prompt": p})[1]["usage"]["prompt_tokens"] for p in body["prompt"]
    ]
    assert usage["prompt_tokens"] == sum(singles)
    assert usage["total_tokens"] == usage["prompt_tokens"] + 30
    for options in ({}, {"include_usage": False}):
        assert all(
            "usage" not in c for c in chunks(server.url, C, body | {"stream_options": options})
        )
    found = chunks(server.url, C, body | {"stream_options": {"include_usage": True}})
    assert found[-1]["choices"] == [] and found[-1]["usage"] == usage
    assert all(c["usage"] is None and c["choices"] for c in found[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(server.url, CC, {"messages": USER, "max_tokens": 5, "stream_options": options})
    counts = [c["usage"]["completion_tokens"] for c in found]
    assert counts == sorted(counts) and counts[-1] == 5


def test_echo_scores_the_prompt(server: Server) -> None:
    """B26: echo with max_tokens 0."""
    body = {"prompt": "one two three", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = call(server.url, C, body)[1]
    choice = answer["choices"][0]
    assert choice["text"] == "one two three" and answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(isinstance(x, float) for x in choice["logprobs"]["token_logprobs"][1:])
    found = chunks(server.url, C, body)
    assert "".join(c["choices"][0]["text"] for c in found) == "one two three"


def test_extras(server: Server) -> None:
    ids = {"return_token_ids": True, "max_tokens": 3}
    answer = call(server.url, C, {"prompt": [5, 6], "prompt_logprobs": 1, **ids})[1]["choices"][0]
    assert answer["prompt_token_ids"] == [5, 6] and len(answer["token_ids"]) == 3
    assert answer["prompt_logprobs"][0] is None and "6" in answer["prompt_logprobs"][1]
    answer = call(server.url, CC, {"messages": USER, **ids})[1]
    assert len(answer["choices"][0]["token_ids"]) == 3 and answer["prompt_token_ids"]
    named = {"return_tokens_as_token_ids": True, "logprobs": 0, "max_tokens": 2}
    answer = call(server.url, C, {"prompt": "x", **named})[1]["choices"][0]
    assert all(t.startswith("token_id:") for t in answer["logprobs"]["tokens"])
    half = [*USER, {"role": "assistant", "content": "Once upon"}]
    options = {"continue_final_message": True, "echo": True, "max_tokens": 2}
    answer = call(server.url, CC, {"messages": half, **options})[1]
    assert answer["choices"][0]["message"]["content"].startswith("Once upon")


def test_tokenize(server: Server) -> None:
    """B20: one way from a conversation to ids, whichever door it comes in by."""
    ids = call(server.url, "/tokenize", {"prompt": "hello 1234"})[1]["tokens"]
    assert call(server.url, "/detokenize", {"tokens": ids})[1]["prompt"] == "hello 1234"
    chat = call(server.url, "/tokenize", {"messages": USER, "return_token_strs": True})[1]
    assert chat["count"] == len(chat["tokens"]) == len(chat["token_strs"])
    used = call(server.url, CC, {"messages": USER, "max_tokens": 1})[1]["usage"]["prompt_tokens"]
    assert used == chat["count"]
    assert call(server.url, "/detokenize", {"tokens": [10**9]})[0] == 400
    assert call(server.url, "/tokenize", {})[0] == 400


def test_request_ids_and_small_routes(server: Server) -> None:
    status, body, headers = call(server.url, C, {"prompt": "x"}, {"X-Request-Id": "abc-1"})
    assert status == 200 and headers["x-request-id"] == "abc-1" and body["id"] == "cmpl-abc-1"
    _, _, headers = call(server.url, C, {"prompt": "x"}, {"X-Request-Id": "a b"})
    assert headers["x-request-id"] not in ("", "a b")
    assert any("abc-1 POST /v1/completions 200" in line for line in server.lines)
    assert call(server.url, "/ping")[0] == 200
    assert call(server.url, "/version")[1]["version"]
    assert call(server.url, "/load")[1] == {"server_load": 0}
    assert CC in call(server.url, "/openapi.json")[1]["paths"]


def test_metrics_add_up(server: Server) -> None:
    """B47: finished sequences by reason add up; gauges are 0 when idle."""
    before = metric(server.url, "request_success_total")
    tokens = metric(server.url, "generation_tokens_total")
    call(server.url, C, {"prompt": "x", "n": 4, "max_tokens": 5})
    events(server.url, C, {"prompt": ["x", "y"], "max_tokens": 5})
    assert metric(server.url, "request_success_total") == before + 6
    assert metric(server.url, "generation_tokens_total") == tokens + 30
    assert metric(server.url, "time_to_first_token_seconds_count") > 0
    assert metric(server.url, "kv_cache_usage_perc") <= 1
    assert alive(server.url)


def test_big_prompt_is_refused_quickly(server: Server) -> None:
    """B48: 20 MB are refused without tokenizing them."""
    raw = json.dumps({"prompt": "word " * 4_000_000}).encode()
    status, body, _ = call(server.url, C, raw=raw)
    assert status == 400 and body["error"]["param"] == "prompt"
    assert "at least" in body["error"]["message"]
