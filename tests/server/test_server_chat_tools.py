"""Tools and reasoning over HTTP: a core that says what the prompt asks for, and a real engine."""

from __future__ import annotations

import asyncio
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
import tiny_model
from serverlib import Server, alive, call, chunks, running
from testdata import template

from jaxengine.wire.frames import DEFAULT_CORE

CC = "/v1/chat/completions"
AUTO = ("--enable-auto-tool-choice", "--tool-call-parser")
SCRIPTED = "scripted_core:Scripted"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("f", a={"type": "integer"}), tool("g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def say(text: str, step: int = 1, **more: Any) -> dict[str, Any]:
    """A body whose answer is `text`."""
    script = json.dumps({"say": text, "step": step})
    return {"messages": [{"role": "user", "content": f"SAY:{script}"}], **more}


@pytest.fixture(scope="module")
def hermes() -> Iterator[Server]:
    flags = ["--chat-template", str(template("qwen3-0.6b.jinja")), "--reasoning-parser", "qwen3"]
    with running(*flags, *AUTO, "hermes", core=SCRIPTED, step=0.002) as up:
        yield up


def gathered(found: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A streamed answer put together, after checks of its form."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    for chunk in found:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            assert len(delta.get("tool_calls", [])) < (1 if choice["finish_reason"] else 2)
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls", []):
                calls = message["tool_calls"]
                if piece["index"] == len(calls):  # B23: the first delta of a call has all of it
                    assert piece["type"] == "function" and piece["function"]["name"]
                    calls.append(piece)
                    continue
                assert set(piece) == {"index", "function"} and set(piece["function"]) == {
                    "arguments"
                }
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    assert len(reasons) == 1
    ids = [c["id"] for c in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    return {**message, "tool_calls": calls, "finish_reason": reasons[0]}


def both(up: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, whole and streamed, which must be the same."""
    status, whole, _ = call(up.url, CC, body)
    assert status == 200, whole
    [choice] = whole["choices"]
    message = choice["message"]
    assert "tool_calls" not in message or message["tool_calls"]
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
    ]
    streamed = gathered(chunks(up.url, CC, body))
    assert streamed == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": calls,
        "finish_reason": choice["finish_reason"],
    }
    assert message["content"] is not None or calls or streamed["reasoning_content"]
    return streamed


@pytest.mark.parametrize("step", [1, 3, 999])
def test_b23_calls_streamed_and_whole(hermes: Server, step: int) -> None:
    text = f"<think>\nhm\n</think>\n\nSo: {CALL}\n{CALL_G}"
    found = both(hermes, say(text, step, tools=TOOLS))
    assert found == {
        "content": "So:",
        "reasoning_content": "hm",
        "tool_calls": [("f", '{"a": 1}'), ("g", "{}")],
        "finish_reason": "tool_calls",
    }
    plain = both(hermes, say("Look: <tool_call and {", step, tools=TOOLS, stop=["zzz"]))
    assert plain["content"] == "Look: <tool_call and {" and plain["finish_reason"] == "stop"


def test_b67_finish_reasons(hermes: Server) -> None:
    def reason(text: str, **more: Any) -> tuple[str, int]:
        found = both(hermes, say(text, tools=TOOLS, **more))
        return found["finish_reason"], len(found["tool_calls"])

    named = {"type": "function", "function": {"name": "f"}}
    assert reason(CALL) == ("tool_calls", 1)
    assert reason(CALL + CALL_G, parallel_tool_calls=False) == ("tool_calls", 1)
    assert reason("text") == ("stop", 0)
    assert reason(CALL, max_tokens=3) == ("length", 0)
    assert reason(CALL, max_tokens=22)[0] == "length"
    assert reason(CALL, tool_choice="none") == ("stop", 0)
    assert reason('[{"name":"g","parameters":{}}]', tool_choice="required") == ("tool_calls", 1)
    assert reason('{"a":1}', tool_choice=named) == ("tool_calls", 1)
    assert reason("<think>\nhm\n</think>\n\n{}", tool_choice=named) == ("tool_calls", 1)
    allowed = {"mode": "auto", "tools": [named]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert reason(CALL, tool_choice=choice) == ("tool_calls", 1)


def _function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "needs"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "must be"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "name is missing"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "q"}}},
        "tool_choice",
        "'q', which is not in tools",
    ),
    ({"tools": "f"}, "tools", "list"),
    ({"tools": [1]}, "tools", "tools[0] must be an object"),
    ({"tools": [{"type": "web"}]}, "tools", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must"),
    ({"tools": _function(name="")}, "tools", "tools[0].function.name"),
    ({"tools": _function(name="a b")}, "tools", "tools[0].function.name"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "there twice"),
    ({"tools": _function(strict="yes")}, "tools", "strict must be"),
    ({"tools": _function(description=1)}, "tools", "description"),
    ({"tools": _function(parameters="x")}, "tools", "function.parameters must"),
    ({"tools": _function(parameters={"type": "array"})}, "tools", 'must be "object"'),
    ({"tools": _function(parameters={"properties": []})}, "tools", "parameters.properties must"),
    (
        {"tools": _function(parameters={"properties": {"a": {"type": "int"}}})},
        "tools",
        "tools[0].function.parameters.properties.a.type must be one of",
    ),
    ({"tools": _function(parameters={"required": "a"})}, "tools", "required must be"),
    (
        {
            "tools": _function(parameters={"properties": {"a": {"$ref": "#/$defs/no"}}}),
            "tool_choice": "required",
        },
        "tools",
        "",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
        },
        "tool_choice",
        "exclude each other",
    ),
    ({"reasoning_effort": "much"}, "reasoning_effort", "must be one of"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", ""),
    ({"response_format": {"type": "structural_tag"}}, "response_format", 'needs "format", or'),
    ({"response_format": {"type": "xml"}}, "response_format", "must be one of"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}],
                }
            ]
        },
        "messages",
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_b67_bad_combinations(
    hermes: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        status, body, _ = call(hermes.url, CC, {**say("x"), **fields, "stream": stream})
        assert status == 400, body
        assert body["error"]["param"] == param and words in body["error"]["message"], body


def test_auto_needs_a_server_made_for_it(server: Server) -> None:
    status, body, _ = call(server.url, CC, {**say("x"), "tools": TOOLS})
    assert status == 400 and "--enable-auto-tool-choice" in body["error"]["message"]
    for choice in ("none", {"type": "function", "function": {"name": "f"}}):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 2}
        status, body, _ = call(server.url, CC, {**say("x"), **fields})
        assert status == 200, body


def test_reasoning_is_left_out_or_off(hermes: Server) -> None:
    text = "<think>\nhm\n</think>\n\nSo"
    assert both(hermes, say(text))["reasoning_content"] == "hm"
    hidden = both(hermes, say(text, include_reasoning=False))
    assert (hidden["content"], hidden["reasoning_content"]) == ("So", "")
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert both(hermes, say(text, **off))["content"] == text  # no reasoning is expected


def test_n_logprobs_and_usage_with_calls(hermes: Server) -> None:
    body = say(CALL, tools=TOOLS, n=3, logprobs=True, stream_options={"include_usage": True})
    found = chunks(hermes.url, CC, body)
    for index in range(3):
        assert gathered(found, index)["tool_calls"] == [("f", '{"a": 1}')]
    scored = [
        e for c in found for x in c["choices"] for e in (x["logprobs"] or {}).get("content", [])
    ]
    assert len(scored) == found[-1]["usage"]["completion_tokens"] and found[-1]["choices"] == []
    ids = {
        p["id"]
        for c in found
        for x in c["choices"]
        for p in x["delta"].get("tool_calls", [])
        if "id" in p
    }
    assert len(ids) == 3


def test_the_other_fields_of_a_chat(hermes: Server) -> None:
    """continue_final_message and echo with parsers; cache_salt, prompt_logprobs, ids."""
    asked = say("ending")["messages"]
    messages = [*asked, {"role": "assistant", "content": "The "}]
    fields: dict[str, Any] = {"messages": messages, "continue_final_message": True, "echo": True}
    assert both(hermes, {**fields, "tools": TOOLS})["content"] == "The ending"
    body = {**say("hi"), "cache_salt": "s", "prompt_logprobs": 1, "n": 2}
    status, whole, headers = call(hermes.url, CC, body, {"X-Request-Id": "mine-1"})
    assert status == 200, whole
    assert whole["id"] == "chatcmpl-mine-1" and headers["x-request-id"] == "mine-1"
    assert whole["prompt_logprobs"][0] is None and len(whole["prompt_logprobs"]) > 2
    assert [c["message"]["content"] for c in whole["choices"]] == ["hi", "hi"]


async def test_b23_eight_streams_with_the_official_client(hermes: Server) -> None:
    client = openai.AsyncOpenAI(base_url=hermes.url + "/v1", api_key="x", max_retries=0)

    async def one(i: int) -> None:
        text = CALL.replace("1", str(i)) + "\n" + CALL_G
        body: Any = say(text, 1 + i % 3, tools=TOOLS)
        async with client.chat.completions.stream(model="demo", **body) as stream:
            names = [e.name async for e in stream if e.type.endswith("arguments.done")]
            final = await stream.get_final_completion()
        assert names == ["f", "g"]
        calls = final.choices[0].message.tool_calls
        assert calls is not None
        assert json.loads(calls[0].function.arguments) == {"a": i}
        assert final.choices[0].finish_reason == "tool_calls"

    async with client:
        await asyncio.gather(*(one(i) for i in range(8)))


@pytest.mark.parametrize("content", [None, "", "absent"])
def test_b21_b22_second_turn(hermes: Server, content: Any) -> None:
    used = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"é":1}'}}
    turn = {"role": "assistant", "content": content, "tool_calls": [used]}
    if content == "absent":
        del turn["content"]
    messages = [
        {"role": "user", "content": "q"},
        turn,
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    status, body, _ = call(hermes.url, "/tokenize", {"messages": messages, "tools": TOOLS})
    assert status == 200, body
    _, shown, _ = call(hermes.url, "/detokenize", {"tokens": body["tokens"]})
    assert '{"name": "f", "arguments": {"é": 1}}' in shown["prompt"]
    assert "<tool_response>\n42\n</tool_response>" in shown["prompt"]
    assert "None" not in shown["prompt"]
    status, body, _ = call(hermes.url, CC, {"messages": messages, "tools": TOOLS, "max_tokens": 2})
    assert status == 200, body


def test_b48_thousands_of_tools(hermes: Server) -> None:
    """They are checked and rendered beside the loop; the prompt is then too long."""
    many = [tool(f"function_{i}", value={"type": "string"}) for i in range(5000)]
    began = time.monotonic()
    status, body, _ = call(hermes.url, CC, say("x", tools=many))
    assert status == 400 and body["error"]["param"] == "messages"
    assert time.monotonic() - began < 30
    assert alive(hermes.url)


ANALYSIS = "<|channel|>analysis<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"]


def test_gpt_oss(tmp_path: pathlib.Path) -> None:
    tokenizer = tiny_model.byte_tokenizer()
    tokenizer.add_special_tokens([*HARMONY, "<|constrain|>"])
    model = tiny_model.build(tmp_path / "model")
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    flags = ["--chat-template", str(template("gpt-oss-120b.jinja")), "--reasoning-parser"]
    with running(model, *flags, "gpt-oss", *AUTO, "gpt-oss", core=SCRIPTED) as up:
        text = f'{ANALYSIS}hm<|end|><|start|>assistant{TO_F}{{"a":1}}<|call|>'
        found = both(up, say(text, 4, tools=TOOLS))
        assert found["reasoning_content"] == "hm" and found["content"] == ""
        assert found["tool_calls"] == [("f", '{"a":1}')]
        final = f"{ANALYSIS}hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"
        assert both(up, say(final, 3))["content"] == "Hi"
        # a constraint begins in the final channel
        wanted = {"type": "json_object"}
        assert both(up, say("{}", response_format=wanted))["content"] == "{}"


class Weather(pydantic.BaseModel):
    city: Literal["Rome", "Paris"]
    warm: bool


class Calc(pydantic.BaseModel):
    n: Literal[1, 2]


def test_enforced_by_a_real_engine(tmp_path: pathlib.Path) -> None:
    """Random weights: what comes out right is the grammar's doing."""
    model = tiny_model.build(tmp_path / "model")
    flags = ["--max-num-seqs", "4", "--warmup", "lazy", "--served-model-name", "tiny"]
    flags += ["--reasoning-parser", "qwen3", *AUTO, "hermes", "--num-gpu-blocks-override", "64"]
    flags += ["--chat-template", "{% set t = tools %}{{ messages[0].content }}"]  # short prompts
    weather: Any = openai.pydantic_function_tool(Weather)
    calc: Any = openai.pydantic_function_tool(Calc)
    never = {str(tiny_model.byte_id(c)): -100.0 for c in "<\n"}  # neither reasoning nor tags
    ask: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": 120,
        "extra_body": {"logit_bias": never},
    }
    with running(model, *flags, core=DEFAULT_CORE) as up:
        client = openai.OpenAI(base_url=up.url + "/v1", api_key="x", max_retries=0)
        chat = client.chat.completions
        parsed = chat.parse(**ask, response_format=Weather).choices[0].message.parsed
        assert isinstance(parsed, Weather)
        tools = [weather, calc]
        for parallel in (True, False):
            made = chat.parse(
                **ask, tools=tools, tool_choice="required", parallel_tool_calls=parallel
            ).choices[0]
            calls = made.message.tool_calls
            if made.finish_reason == "tool_calls":  # else cut: the list may be long
                assert calls and (parallel or len(calls) == 1)
                for one in calls:
                    assert isinstance(one.function.parsed_arguments, Weather | Calc)
            else:
                assert parallel and made.finish_reason == "length"
        choice: Any = {"type": "function", "function": {"name": "Weather"}}
        named = chat.parse(**ask, tools=tools, tool_choice=choice).choices[0]
        assert named.finish_reason == "tool_calls" and named.message.content is None
        assert named.message.tool_calls
        assert isinstance(named.message.tool_calls[0].function.parsed_arguments, Weather)
        with chat.stream(**ask, tools=tools, tool_choice=choice) as stream:
            for _ in stream:
                continue
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed
        assert isinstance(streamed[0].function.parsed_arguments, Weather)
        # with "auto" the answer is a call or has the form asked for; the bias leaves the latter
        either = chat.parse(**ask, tools=tools, response_format=Weather).choices[0].message
        assert isinstance(either.parsed, Weather) and not either.tool_calls
        assert alive(up.url)
