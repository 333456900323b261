"""/v1/responses with the official client, against answers that the prompt asks for."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from serverlib import Server, alive, call, eventually, hang_up, metric, running

from jaxengine.server.responses.body import ResponsesBody, chat_fields
from jaxengine.server.responses.input import (
    droppable,
    to_messages,
    with_instructions,
    without,
)
from jaxengine.server.responses.store import Job, ResponseStore, Stored

R, M = "/v1/responses", "/v1/messages"
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLS = (
    "<think>plan it step by step and then ask for both</think>Wait."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def say(text: str, step: int = 1) -> str:
    return "SAY:" + json.dumps({"say": text, "step": step})


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags += ("--reasoning-parser", "deepseek_r1", "--max-model-len", "512")
    with running(*flags, core="scripted_core:Scripted", step=0.01) as up:
        yield up


@pytest.fixture(scope="module")
def client(scripted: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def shape(output: list[dict[str, Any]]) -> list[Any]:
    """Output items less their ids."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


def test_create_retrieve_delete(scripted: Server, client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="demo",
        instructions="Be brief.",
        input=say("<think>hm, so</think>Hello there"),
        metadata={"k": "v"},
        temperature=0.5,
        text={"format": {"type": "text"}},
    )
    assert made.output_text == "Hello there" and made.status == "completed"
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.output[0].content[0].text == "hm, so"
    assert (made.temperature, made.metadata, made.truncation) == (0.5, {"k": "v"}, "disabled")
    usage = made.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    unstored = client.responses.create(model="demo", input=say("<think></think>x"), store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    cut = client.responses.create(model="demo", input="hi", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[-1].status == "incomplete" and cut.usage.output_tokens == 3


def test_stream_has_all_events(scripted: Server, client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "demo", "input": say(CALLS), "tools": [TOOL]}
    found = list(client.responses.create(**ask, stream=True))
    assert [e.sequence_number for e in found] == list(range(len(found)))
    kinds = [e.type.removeprefix("response.") for e in found]
    short = [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]]
    part = ["content_part.done", "output_item.done"]
    each_call = ["output_item.added", "function_call_arguments.delta"]
    each_call += ["function_call_arguments.done", "output_item.done"]
    begin = ["output_item.added", "content_part.added"]
    assert short == [
        *("created", "in_progress", *begin, "reasoning_text.delta", "reasoning_text.done", *part),
        *(*begin, "output_text.delta", "output_text.done", *part),
        *(*each_call, *each_call, "completed"),
    ]
    for delta, done, name in [
        ("reasoning_text.delta", "reasoning_text.done", "text"),
        ("output_text.delta", "output_text.done", "text"),
        ("function_call_arguments.delta", "function_call_arguments.done", "arguments"),
    ]:
        for end in (e for e in found if e.type == f"response.{done}"):
            mine = [e for e in found if e.type == f"response.{delta}" and e.item_id == end.item_id]
            assert "".join(e.delta for e in mine) == getattr(end, name) != ""
    final = found[-1].response
    done_items = [e.item for e in found if e.type == "response.output_item.done"]
    assert [i.model_dump() for i in final.output] == [i.model_dump() for i in done_items]
    whole = client.responses.create(**ask)
    assert shape(whole.model_dump()["output"]) == shape(final.model_dump()["output"])
    assert whole.usage == final.usage and whole.status == final.status == "completed"
    assert [json.loads(i.arguments)["city"] for i in whole.output[2:]] == ["Rome", "Oslo"]
    assert client.responses.retrieve(final.id).model_dump() == final.model_dump()
    with client.responses.stream(**ask) as stream:  # the client's own reading of the events
        assert shape(stream.get_final_response().model_dump(exclude={"parsed"})["output"])


def test_conversation(scripted: Server, client: openai.OpenAI) -> None:
    """A tool's answer reaches the model, by an id or as items; both make the same prompt."""
    first = client.responses.create(model="demo", input=say(CALLS), tools=[TOOL])
    answers: list[Any] = [
        {"type": "function_call_output", "call_id": c.call_id, "output": say("<think></think>Sun")}
        for c in first.output
        if c.type == "function_call"
    ]
    second = client.responses.create(
        model="demo", previous_response_id=first.id, input=answers, tools=[TOOL]
    )
    assert second.output_text == "Sun" and second.previous_response_id == first.id
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": say(CALLS)}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    same = client.responses.create(model="demo", input=items + answers, tools=[TOOL])
    assert same.output_text == "Sun" and same.usage.input_tokens == second.usage.input_tokens
    third = client.responses.create(
        model="demo", previous_response_id=second.id, input=say("<think></think>Yes")
    )
    assert third.output_text == "Yes"


def test_parse_and_logprobs(scripted: Server, client: openai.OpenAI) -> None:
    class City(BaseModel):
        name: str

    with pytest.raises(openai.BadRequestError):
        client.responses.create(
            model="demo", input="x", text={"format": {"type": "json_schema", "name": "x"}}
        )
    parsed = client.responses.parse(
        model="demo",
        input=say('<think></think>{"name": "Rome"}'),
        text_format=City,
    )
    assert parsed.output_parsed == City(name="Rome")
    scored = client.responses.create(
        model="demo",
        input=say("<think>a</think>Hello there"),
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    assert [i.type for i in scored.output] == ["reasoning", "message"]
    found = scored.output[1].content[0].logprobs
    assert found and all(len(entry.top_logprobs) == 2 for entry in found)


def test_background(scripted: Server, client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "demo", "background": True}
    made = client.responses.create(**ask, input=say("<think></think>In time"))
    assert made.status == "queued" and not made.output
    eventually(lambda: client.responses.retrieve(made.id).status == "completed")
    assert client.responses.retrieve(made.id).output_text == "In time"

    long = client.responses.create(**ask, input="hi", max_output_tokens=400)
    eventually(lambda: client.responses.retrieve(long.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="demo", previous_response_id=long.id, input="x")
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.cancel(long.id).status == "cancelled"
    eventually(lambda: metric(scripted.url, "num_requests_running") == 0)

    stream = client.responses.create(**ask, input="hi", max_output_tokens=60, stream=True)
    seen = [next(iter(stream)) for _ in range(5)]
    stream.close()  # it runs on
    name = seen[0].response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=4))
    assert [e.sequence_number for e in seen + rest] == list(range(5 + len(rest)))
    assert rest[-1].type == "response.incomplete"
    assert not list(client.responses.retrieve(name, stream=True, starting_after=10**6))
    whole = list(client.responses.retrieve(name, stream=True))
    [item] = rest[-1].response.output  # the model never came to an end of its reasoning
    assert "".join(e.delta for e in whole if "delta" in e.type) == item.content[0].text != ""
    for other in (made.id, call(scripted.url, R, {"input": "x", "max_output_tokens": 1})[1]["id"]):
        assert call(scripted.url, f"{R}/{other}?stream=true")[0] == 400
    assert call(scripted.url, f"{R}/{other}/cancel", {})[0] == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "no", "output": "x"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": "long " * 600}, "input"),
        ({"tools": [{"type": 5}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"truncation": "some"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "all"}}, "reasoning"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "no"}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input"),
        ({"tools": [TOOL], "tool_choice": {"type": ["function"]}}, "tool_choice"),
        ({"text": {"format": {"type": "text", "x": "\ud800"}}}, None),
    ],
    ids=str,
)
def test_refused(scripted: Server, fields: dict[str, Any], param: str | None) -> None:
    status, body, _ = call(scripted.url, R, {"input": "hi", **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert param in (None, "input") or param.split(".")[0] in body["error"]["message"]


def test_truncation_drops_what_is_oldest(scripted: Server, client: openai.OpenAI) -> None:
    old: list[Any] = [{"role": "user", "content": "old " * 100}] * 8
    last = [{"role": "user", "content": say("<think></think>fits")}]
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="demo", input=old + last)
    made = client.responses.create(
        model="demo", instructions="Stay.", input=old + last, truncation="auto"
    )
    assert made.output_text == "fits" and 300 < made.usage.input_tokens < 512


def test_streams_as_it_comes_until_the_client_goes(slow_server: Server) -> None:
    """The first text is there while the engine has 80 seconds to go; hanging up ends them."""
    asks: list[tuple[str, dict[str, Any], bytes]] = [
        (R, {"input": "hi", "max_output_tokens": 4000}, b"response.output_text.delta"),
        (M, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000}, b"text_delta"),
    ]
    for path, body, mark in asks:
        data = json.dumps({**body, "stream": True}).encode()
        asked = urllib.request.Request(
            slow_server.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert any(mark in line for line in response)
            eventually(lambda: metric(slow_server.url, "num_requests_running") == 1)
        assert alive(slow_server.url)
    body = asks[0][1]
    hang_up(slow_server.port, R, body, 0.5)
    assert alive(slow_server.url)


def test_failure_inside_a_stream() -> None:
    """The engine fails a request after three tokens: the stream says so in the API's own form."""
    with running(core="faulty_cores:RequestFails", step=0.05) as up:
        with openai.OpenAI(base_url=f"{up.url}/v1", api_key="x", max_retries=0) as client:
            ask: dict[str, Any] = {"model": "demo", "input": "hi", "max_output_tokens": 19}
            found = list(client.responses.create(**ask, stream=True))
            assert found[-1].type == "response.failed"
            failed = found[-1].response
            assert failed.status == "failed" and "numbers" in failed.error.message
            assert [e.sequence_number for e in found] == list(range(len(found)))
            with pytest.raises(openai.InternalServerError):
                client.responses.create(**ask)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 19}
        status, text, _ = call(up.url, M, {**body, "stream": True})
        last = text.strip().split("\n\n")[-1].split("\n")
        assert status == 200 and last[0] == "event: error"
        error = json.loads(last[1].removeprefix("data: "))
        assert error["type"] == "error" and error["error"]["type"] == "api_error"
        assert call(up.url, M, body)[1]["error"]["type"] == "api_error"


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"role": "assistant", "content": "end"},
    ]
    found = to_messages(items)
    assert [m["role"] for m in found] == [
        *("system", "user", "assistant", "tool", "tool", "assistant")
    ]
    assert found[1]["content"] == "a\na"
    turn = found[2]
    assert (turn["reasoning_content"], turn["content"]) == ("r", "t")
    assert [c["function"]["name"] for c in turn["tool_calls"]] == ["f", "g"]
    assert [m["name"] for m in found[3:5]] == ["g", "f"]
    assert found[5] == {"role": "assistant", "content": "end", "reasoning_content": "s"}
    whole = with_instructions(found, "Be brief.")
    assert whole[0]["content"] == "Be brief.\n\nRules." and whole[1:] == found[1:]
    # an answer of a tool never comes first
    assert droppable(whole) == [0, 1, 4] and without(whole, 4) == [whole[0], whole[5]]


def test_allowed_tools() -> None:
    tools = [TOOL, TOOL | {"name": "time"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "time"}]}
    body = ResponsesBody(input="x", tools=tools, tool_choice=allowed)
    fields = chat_fields(body, [])
    assert [t["function"]["name"] for t in fields["tools"]] == ["time"]
    assert fields["tool_choice"] == "required"


def test_store_is_bounded() -> None:
    def entry(name: str, size: int = 0, job: Job | None = None) -> Stored:
        return Stored({"id": name, "x": "x" * size}, [], job)

    store = ResponseStore(max_count=2, max_bytes=1000)
    for name in "abc":
        store.put(entry(name))
        store.get("a")  # used most recently
    assert [store.get(n) is not None for n in "abc"] == [True, False, True]
    store.put(entry("big", 960))
    assert store.get("a") is None and store.get("c") is None and store.get("big") is not None
    job = Job()
    store.put(entry("running", 2000, job))
    assert store.get("big") is None and store.get("running") is not None and len(store) == 1
    job.done = True
    store.put(entry("d"))
    assert store.get("running") is None and store.get("d") is not None
