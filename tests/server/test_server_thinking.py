"""Thinking budgets over HTTP, on a real engine: random weights, which would think for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
import tiny_model
from serverlib import Server, call, chunks, running

from jaxengine.wire.frames import DEFAULT_CORE

C, CC = "/v1/completions", "/v1/chat/completions"
END = [tiny_model.byte_id(char) for char in "</think>"]
ASK = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 60, "ignore_eos": True}
# neither tags nor blanks by itself
ASK |= {"logit_bias": {str(tiny_model.byte_id(c)): -100.0 for c in "<\n "}, "temperature": 0}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model.build(tmp_path_factory.mktemp("tiny"))
    # the shapes of test_server_chat_tools: compiled once for both
    flags = ["--max-num-seqs", "4", "--warmup", "lazy"]
    flags += ["--num-gpu-blocks-override", "64", "--reasoning-parser", "deepseek_r1"]
    with running(model, *flags, "--served-model-name", "tiny", core=DEFAULT_CORE) as server:
        yield server


def answered(up: Server, **more: Any) -> dict[str, Any]:
    status, body, _ = call(up.url, CC, {**ASK, "return_token_ids": True, **more})
    assert status == 200, body
    [choice] = body["choices"]
    return dict(choice)


def test_the_thought_ends_and_the_answer_begins(up: Server) -> None:
    free = answered(up)
    assert free["message"]["content"] is None and len(free["token_ids"]) == 60
    for budget in (0, 10, 51):
        choice = answered(up, thinking_token_budget=budget)
        ids = choice["token_ids"]
        assert ids[:budget] == free["token_ids"][:budget]
        assert ids[budget : budget + 8] == END and len(ids) == 60
        assert choice["message"]["content"]
        assert bool(choice["message"].get("reasoning_content")) == (budget > 0)
    assert answered(up, thinking_token_budget=-1)["token_ids"] == free["token_ids"]
    assert answered(up, thinking_token_budget=60)["token_ids"] == free["token_ids"]
    whole = answered(up, thinking_token_budget=10)["message"]
    deltas = [
        c["choices"][0]["delta"] for c in chunks(up.url, CC, {**ASK, "thinking_token_budget": 10})
    ]
    for name in ("reasoning_content", "content"):
        assert "".join(d.get(name) or "" for d in deltas) == whole[name]


def test_a_form_of_the_answer_begins_behind_it(up: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = answered(up, thinking_token_budget=6, response_format=asked)
    assert json.loads(choice["message"]["content"]) in ({"a": 1}, {"a": 2})
    assert choice["token_ids"][6:14] == END and choice["finish_reason"] == "stop"


def test_a_thought_that_the_prompt_began_counts(up: Server) -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": "<think>12345"}]  # type: ignore[misc]
    more = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    assert answered(up, thinking_token_budget=9, **more)["token_ids"][4:12] == END


def test_completions(up: Server) -> None:
    body = {k: v for k, v in ASK.items() if k != "messages"} | {"prompt": "x <think>"}
    body |= {"thinking_token_budget": 3, "return_token_ids": True}
    status, answer, _ = call(up.url, C, body)
    assert status == 200 and answer["choices"][0]["token_ids"][3:11] == END
    status, answer, _ = call(up.url, C, body | {"prompt": "<think>hm</think>"})
    assert status == 200 and "<" not in answer["choices"][0]["text"]


def test_the_real_client_of_anthropic(up: Server) -> None:
    client = anthropic.Anthropic(base_url=up.url, api_key="x", max_retries=0)
    extra = {name: ASK[name] for name in ("logit_bias", "ignore_eos")}
    answer = client.messages.create(
        model="tiny",
        max_tokens=60,
        messages=[{"role": "user", "content": "?"}],
        thinking={"type": "enabled", "budget_tokens": 12},
        extra_body={**extra, "top_k": 1},
    )
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"thinking_token_budget": -2}, "must be at least -1"),
        ({"thinking_token_budget": 1.5}, "must be an integer"),
        ({"thinking_token_budget": 3, "allowed_token_ids": [5]}, "cannot be combined"),
    ],
)
def test_bad_budgets(up: Server, fields: dict[str, Any], reason: str) -> None:
    status, body, _ = call(up.url, CC, {**ASK, **fields})
    assert status == 400 and body["error"]["param"] == "thinking_token_budget", body
    assert reason in body["error"]["message"]


def test_a_bad_budget_has_the_name_that_the_client_wrote(up: Server) -> None:
    body = {"messages": ASK["messages"], "max_tokens": 4}
    body["thinking"] = {"type": "enabled", "budget_tokens": "many"}
    status, answer, _ = call(up.url, "/v1/messages", body)
    assert status == 400 and "thinking.budget_tokens" in answer["error"]["message"], answer


def test_without_a_reasoning_parser(server: Server) -> None:
    """A request is refused; Anthropic's clients always send a budget, which asks for nothing."""
    status, body, _ = call(server.url, CC, {**ASK, "thinking_token_budget": 3, "max_tokens": 2})
    assert status == 400 and "--reasoning-parser" in body["error"]["message"]
    asked = {"messages": ASK["messages"], "max_tokens": 4}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 2}
    assert call(server.url, "/v1/messages", asked)[0] == 200
