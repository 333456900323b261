"""`functions` and `function_call`, the older names of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serverlib import Server, alive, call, chunks, running
from testdata import template

CC = "/v1/chat/completions"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
FUNCTIONS = [FUNCTION, {"name": "g"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ARGUMENTS = {"name": "f", "arguments": '{"a": 1}'}


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    flags = ["--chat-template", str(template("qwen3-0.6b.jinja")), "--enable-auto-tool-choice"]
    core = "scripted_core:Scripted"
    with running(*flags, "--tool-call-parser", "hermes", core=core) as server:
        yield server
        assert alive(server.url)


def say(text: str, step: int = 1, **more: Any) -> dict[str, Any]:
    script = json.dumps({"say": text, "step": step})
    return {"messages": [{"role": "user", "content": f"SAY:{script}"}], **more}


@pytest.mark.parametrize("step", [1, 5, 999])
def test_a_call(up: Server, step: int) -> None:
    """The second call of the answer is left out: there is room for one."""
    body = say(f"So: {CALL}\n{CALL}", step, functions=FUNCTIONS)
    status, whole, _ = call(up.url, CC, body)
    assert status == 200, whole
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == ARGUMENTS
    assert choice["message"]["content"] == "So:" and "tool_calls" not in choice["message"]
    deltas = [c["choices"][0]["delta"] for c in chunks(up.url, CC, body)]
    assert not any("tool_calls" in delta for delta in deltas)
    pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [p["name"] for p in pieces if "name" in p] == ["f"] and "name" in pieces[0]
    assert "".join(p["arguments"] for p in pieces) == ARGUMENTS["arguments"]
    last = chunks(up.url, CC, body)[-1]["choices"][0]
    assert last["finish_reason"] == "function_call"


def test_no_call(up: Server) -> None:
    for more in ({"functions": FUNCTIONS}, {"functions": FUNCTIONS, "function_call": "auto"}):
        choice = call(up.url, CC, say("Hello.", **more))[1]["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "Hello."
        assert "function_call" not in choice["message"]
    choice = call(up.url, CC, say(CALL, functions=FUNCTIONS, function_call="none"))[1]["choices"][0]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_a_named_function_is_enforced(up: Server) -> None:
    """The scripted core knows no grammar: it is told to say what the grammar would make."""
    body = say('{"a":2}', functions=FUNCTIONS, function_call={"name": "f"})
    choice = call(up.url, CC, body)[1]["choices"][0]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a":2}'}
    assert choice["finish_reason"] == "function_call"


def test_a_conversation_with_results(up: Server) -> None:
    turns = [
        {"role": "user", "content": "call it"},
        {"role": "assistant", "content": None, "function_call": ARGUMENTS},
        {"role": "function", "name": "f", "content": "42"},
    ]
    body = say("The answer is 42.", functions=FUNCTIONS)
    body["messages"] = [*turns, *body["messages"]]
    status, whole, _ = call(up.url, CC, body)
    assert status == 200, whole
    as_tools = [
        turns[0],
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": ARGUMENTS}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    ids = [
        call(up.url, "/tokenize", {"messages": messages})[1]["tokens"]
        for messages in (turns, as_tools)
    ]
    assert ids[0] == ids[1]


def test_the_real_client(up: Server) -> None:
    client = openai.OpenAI(base_url=f"{up.url}/v1", api_key="none")
    body = say(CALL)
    answer = client.chat.completions.create(
        model="demo",
        messages=body["messages"],
        functions=FUNCTIONS,  # type: ignore[arg-type]
        function_call="auto",
    )
    made = answer.choices[0].message.function_call
    assert made is not None and (made.name, made.arguments) == ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"function_call": {"name": "f"}}, "function_call", "needs functions"),
        (
            {"functions": FUNCTIONS, "function_call": {"name": "h"}},
            "function_call",
            "function_call names the function 'h', which is not in functions",
        ),
        ({"functions": FUNCTIONS, "function_call": 3}, "function_call", "must be"),
        ({"functions": FUNCTIONS, "function_call": {}}, "function_call", "name is missing"),
        ({"functions": [{"name": ""}]}, "functions", "functions[0].name must be"),
        ({"functions": [3]}, "functions", "functions[0] must be an object"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions", "functions[1].name 'f' is there twice"),
        (
            {"functions": FUNCTIONS, "tools": [{"type": "function", "function": FUNCTION}]},
            "functions",
            "exclude each other",
        ),
        (
            {"messages": [{"role": "function", "content": "42"}], "functions": FUNCTIONS},
            "messages",
            "messages[0].name must be",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]},
            "messages",
            "messages[0].function_call.arguments is not valid JSON",
        ),
    ],
)
def test_bad_fields_are_named(up: Server, fields: dict[str, Any], param: str, reason: str) -> None:
    status, body, _ = call(up.url, CC, {**say("x"), **fields})
    assert status == 400 and body["error"]["param"] == param, body
    assert reason in body["error"]["message"]
