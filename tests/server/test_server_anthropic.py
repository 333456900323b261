"""/v1/messages with the official client, against answers that the prompt asks for."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from serverlib import Server, call, running

M = "/v1/messages"
KEY = "secret"
TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLS = (
    "<think>plan it step by step and then ask for both</think>Wait."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def say(text: str) -> str:
    return "SAY:" + json.dumps({"say": text})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def named_events(url: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: name and data."""
    data = json.dumps({**body, "stream": True}).encode()
    headers = {"Content-Type": "application/json", "X-Api-Key": KEY}
    with urllib.request.urlopen(urllib.request.Request(url + M, data, headers)) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = response.read().decode()
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, body_line = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(body_line.removeprefix("data: "))))
    return found


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags += ("--reasoning-parser", "deepseek_r1", "--max-model-len", "512", "--api-key", KEY)
    with running(*flags, core="scripted_core:Scripted", step=0.01) as up:
        yield up


@pytest.fixture(scope="module")
def client(scripted: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scripted.url, api_key=KEY, max_retries=0) as made:
        yield made


def test_text_and_stop_reasons(client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 60}
    whole = client.messages.create(
        **ask,
        system=[{"type": "text", "text": "Be brief."}],
        messages=[user([{"type": "text", "text": say("<think></think>Hello there")}])],
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5},
    )
    assert whole.content[0].text == "Hello there" and whole.role == "assistant"
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    assert whole.id.startswith("msg_") and whole._request_id == whole.id.removeprefix("msg_")
    assert whole.usage.input_tokens > 0 and whole.usage.output_tokens > 0
    stopped = client.messages.create(
        **ask, messages=[user(say("<think></think>one two three"))], stop_sequences=["two"]
    )
    assert stopped.content[0].text == "one "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    cut = client.messages.create(model="demo", max_tokens=3, messages=[user("hi")])
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3


def test_stream_has_all_events(scripted: Server, client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 200,
        "messages": [user(say(CALLS))],
        "tools": [TOOL],
    }
    whole = client.messages.create(**ask)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [b.input for b in whole.content if b.type == "tool_use"] == [
        {"city": "Rome"},
        {"city": "Oslo"},
    ]
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message().model_dump()
    expected = whole.model_dump()
    for message in (streamed, expected):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
    assert streamed == expected

    found = named_events(scripted.url, ask)
    kinds = [kind for kind, _ in found]
    short = [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert short == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    assert all(data["type"] == kind for kind, data in found)
    places = [data["index"] for _, data in found if "index" in data]
    assert places == sorted(places) and set(places) == set(range(4))
    start = found[0][1]["message"]
    assert start["content"] == [] and start["usage"]["input_tokens"] == whole.usage.input_tokens
    assert found[-2][1]["usage"]["output_tokens"] == whole.usage.output_tokens


def test_conversation(client: anthropic.Anthropic) -> None:
    """Tool results reach the model; thinking and calls are part of the prompt."""
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 200, "tools": [TOOL]}
    question = user(say(CALLS))
    first = client.messages.create(**ask, messages=[question])
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": say("<think></think>Sun")}
        for b in first.content
        if b.type == "tool_use"
    ]
    answer = [b.model_dump(exclude_none=True) for b in first.content]
    talk: list[Any] = [question, {"role": "assistant", "content": answer}, user(results)]
    second = client.messages.create(**ask, messages=talk)
    assert second.content[0].text == "Sun" and second.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="demo", messages=talk, tools=[TOOL])
    assert counted.input_tokens == second.usage.input_tokens
    fewer = client.messages.count_tokens(model="demo", messages=talk)
    assert fewer.input_tokens < counted.input_tokens


def test_prefill_continues(client: anthropic.Anthropic) -> None:
    """A last message of the assistant is gone on with, and not repeated."""
    script = say("</think>and so on")
    talk: list[Any] = [user("hi"), {"role": "assistant", "content": script}]
    made = client.messages.create(model="demo", max_tokens=60, messages=talk)
    assert "and so on" in "".join(b.text for b in made.content if b.type == "text")
    assert "SAY:" not in json.dumps(made.model_dump())
    counted = client.messages.count_tokens(model="demo", messages=talk)
    opened = client.messages.count_tokens(model="demo", messages=[*talk, user("")])
    assert counted.input_tokens == made.usage.input_tokens < opened.input_tokens


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [user([{"type": "image"}])]}, "messages[0].content[0].type 'image'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [user([{"type": "tool_result", "tool_use_id": "no"}])]},
            "messages[0].content[0].tool_use_id 'no'",
        ),
        ({"messages": [user("long " * 600)]}, "prompt is too long: "),
        ({"tools": [{"type": 5, "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "w"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management"),
    ],
    ids=str,
)
def test_refused(scripted: Server, fields: dict[str, Any], text: str) -> None:
    body = {"messages": [user("hi")], "max_tokens": 5, **fields}
    body = {k: v for k, v in body.items() if v is not None}
    status, answer, headers = call(scripted.url, M, body, {"X-Api-Key": KEY})
    assert status == 400 and answer["type"] == "error", answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert text in answer["error"]["message"]
    assert answer["request_id"] == headers["request-id"]


def test_errors_have_anthropics_form(scripted: Server, client: anthropic.Anthropic) -> None:
    body = {"messages": [user("hi")], "max_tokens": 5}
    for headers in ({}, {"X-Api-Key": "wrong"}, {"Authorization": "Bearer wrong"}):
        status, answer, _ = call(scripted.url, M, body, headers)
        assert status == 401 and answer["type"] == "error"
        assert answer["error"]["type"] == "authentication_error"
    for good in ({"X-Api-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
        assert call(scripted.url, M, body, good)[0] == 200
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="other", max_tokens=5, messages=[user("hi")])
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    status, answer, _ = call(scripted.url, M, raw=b"{", headers={"X-Api-Key": KEY})
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    status, answer, _ = call(scripted.url, f"{M}/count_tokens", {}, {"X-Api-Key": KEY})
    assert status == 400 and "messages" in answer["error"]["message"]
