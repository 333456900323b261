"""Agents and harnesses as they really are: what Claude Code, Codex, opencode and evaluation tools
send, and what they look for in the answers (field cases F01-F55)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_model
from serverlib import Server, call, chunks, events, metric, running
from testdata import template

C, CC = "/v1/completions", "/v1/chat/completions"
FEW = {"input": "x", "max_output_tokens": 1}
R, M = "/v1/responses", "/v1/messages"
SCRIPTED = "scripted_core:Scripted"
AUTO = ("--enable-auto-tool-choice", "--tool-call-parser")


def say(text: str, step: int = 1, **more: Any) -> dict[str, Any]:
    """A chat whose answer is `text`."""
    script = json.dumps({"say": text, "step": step})
    return {"messages": [{"role": "user", "content": f"SAY:{script}"}], **more}


def answer(up: Server, path: str, body: dict[str, Any]) -> Any:
    status, found, _ = call(up.url, path, body)
    assert status == 200, found
    return found


@pytest.fixture(scope="module")
def thinker() -> Iterator[Server]:
    flags = ["--chat-template", str(template("qwen3-0.6b.jinja")), "--reasoning-parser", "qwen3"]
    with running(*flags, *AUTO, "hermes", core=SCRIPTED, step=0.001) as up:
        yield up


# -- F01: stop strings act on the answer alone ---------------------------------------------------

THOUGHT = "<think>\nQ: why?\n</think>\n\nAnswer Q: next"


@pytest.mark.parametrize("step", [1, 3, 50])
def test_stop_strings_pass_over_the_thoughts(thinker: Server, step: int) -> None:
    body = say(THOUGHT, step, stop=["Q:"])
    [choice] = answer(thinker, CC, body)["choices"]
    assert choice["message"]["reasoning"] == "Q: why?"
    assert choice["message"]["content"] == "Answer "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Q:")
    streamed = chunks(thinker.url, CC, body)
    deltas = [c["choices"][0]["delta"] for c in streamed if c["choices"]]
    assert "".join(d.get("content") or "" for d in deltas) == "Answer "
    assert "".join(d.get("reasoning") or "" for d in deltas) == "Q: why?"


def test_stop_strings_in_messages_and_responses(thinker: Server) -> None:
    turn = say(THOUGHT)["messages"]
    made = answer(thinker, M, {"messages": turn, "max_tokens": 99, "stop_sequences": ["Q:"]})
    assert [b["type"] for b in made["content"]] == ["thinking", "text"]
    assert made["content"][1]["text"] == "Answer "
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "Q:")
    made = answer(thinker, R, {"input": turn, "stop": ["Q:"]})
    assert made["output"][1]["content"][0]["text"] == "Answer "


@pytest.mark.parametrize(
    ("text", "stop", "content", "reasoning"),
    [
        ("Answer Q: next", ["Q:"], "Answer ", None),  # no thoughts at all
        ("<think>a STOP b", ["STOP"], None, "a STOP b"),  # thoughts that never end
        ("<think>a</think>STOP b", ["STOP"], None, "a"),
        ("<think>x</thi</think>y</think>STOP", ["STOP"], "y</think>", "x</thi"),
        ("<think>so</think>ab", ["kab", "o</think>a"], "ab", "so"),  # not across the border
    ],
)
def test_stop_strings_at_the_border(
    thinker: Server, text: str, stop: list[str], content: str | None, reasoning: str | None
) -> None:
    for step in (1, 50):
        [choice] = answer(thinker, CC, say(text, step, stop=stop))["choices"]
        message = choice["message"]
        assert (message["content"] or None, message.get("reasoning")) == (content, reasoning)


def test_stop_strings_in_channels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """gpt-oss: the final channel is the answer."""
    marks = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"]
    tokenizer = tiny_model.byte_tokenizer()
    tokenizer.add_special_tokens([*marks, "<|constrain|>"])
    folder = tmp_path_factory.mktemp("oss") / "model"
    model = tiny_model.build(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = ["--chat-template", str(template("gpt-oss-120b.jinja")), "--reasoning-parser"]
    with running(model, *flags, "gpt-oss", core=SCRIPTED) as up:
        text = "<|channel|>analysis<|message|>Q: hm<|end|><|start|>assistant"
        text += "<|channel|>final<|message|>Hi Q: there<|return|>"
        for step in (1, 3, 50):
            [choice] = answer(up, CC, say(text, step, stop="Q:"))["choices"]
            assert choice["message"]["reasoning"] == "Q: hm"
            assert choice["message"]["content"] == "Hi "


def test_completions_have_no_thoughts(thinker: Server) -> None:
    script = json.dumps({"say": THOUGHT})
    [choice] = answer(thinker, C, {"prompt": f"SAY:{script}", "stop": "Q:"})["choices"]
    assert choice["text"] == "<think>\n" and choice["stop_reason"] == "Q:"


# -- F15: both names -----------------------------------------------------------------------------


def test_reasoning_has_both_names(thinker: Server) -> None:
    body = say("<think>hm</think>So")
    [choice] = answer(thinker, CC, body)["choices"]
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "hm"
    deltas = [c["choices"][0]["delta"] for c in chunks(thinker.url, CC, body) if c["choices"]]
    for delta in deltas:
        assert delta.get("reasoning") == delta.get("reasoning_content")
    assert "".join(d.get("reasoning") or "" for d in deltas) == "hm"
    made = answer(thinker, CC, say("So"))["choices"][0]["message"]
    assert "reasoning" not in made or made["reasoning"] is None


# -- F16, F52, F19: Claude Code ------------------------------------------------------------------

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
LONG = "You are careful. " * 40


@pytest.mark.parametrize(
    "system",
    [
        lambda cch: [
            {"type": "text", "text": HEADER.format(cch)},
            {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}},
        ],
        lambda cch: HEADER.format(cch) + "\n" + LONG,
        lambda cch: [{"type": "text", "text": HEADER.format(cch) + "\n" + LONG}],
        lambda cch: "\n" + HEADER.format(cch) + "\n" + HEADER.format(cch) + "\n" + LONG,
    ],
    ids=["blocks", "string", "one block", "twice"],
)
def test_the_billing_header_is_dropped(thinker: Server, system: Any) -> None:
    """It changes with every request: with it in the prompt, no prefix would ever be found."""

    def count(given: Any) -> int:
        body = {"system": given, "messages": [{"role": "user", "content": "hi"}]}
        return int(answer(thinker, f"{M}/count_tokens", body)["input_tokens"])

    assert count(system("aa11")) == count(system("bb22345")) == count(LONG)
    kept = "Say x-anthropic-billing-header: nothing"
    assert count(kept) > count("Say nothing")


def test_the_prefix_is_found_again(engine_server: Server) -> None:
    def read(cch: str) -> int:
        system = [{"type": "text", "text": HEADER.format(cch)}, {"type": "text", "text": LONG[:80]}]
        body = {"system": system, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        return int(answer(engine_server, M, body)["usage"]["cache_read_input_tokens"])

    first, second, third = (read(cch) for cch in ("aa11", "bb22", "cc33"))
    assert second == third > first


def test_redacted_thinking_is_left_out(thinker: Server) -> None:
    def count(blocks: list[dict[str, Any]]) -> int:
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": "c"},
        ]
        answer(thinker, M, {"messages": turns, "max_tokens": 2})
        return int(answer(thinker, f"{M}/count_tokens", {"messages": turns})["input_tokens"])

    text = {"type": "text", "text": "b"}
    assert count([{"type": "redacted_thinking", "data": "xx"}, text]) == count([text])


FUNCTION = {"name": "shell", "input_schema": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


def test_hosted_tools_of_messages_are_left_out(thinker: Server) -> None:
    turn = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    both = answer(thinker, f"{M}/count_tokens", {**turn, "tools": [FUNCTION, SEARCH]})
    assert both == answer(thinker, f"{M}/count_tokens", {**turn, "tools": [FUNCTION]})
    answer(thinker, M, {**turn, "tools": [SEARCH]})
    answer(thinker, M, {**turn, "tools": [SEARCH, FUNCTION], "tool_choice": {"type": "auto"}})
    assert any("'web_search_20250305' is left out" in line for line in thinker.lines)
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "any"}):
        tools = [SEARCH] if choice["type"] == "any" else [SEARCH, FUNCTION]
        status, found, _ = call(thinker.url, M, {**turn, "tools": tools, "tool_choice": choice})
        assert status == 400 and "web_search" in found["error"]["message"]


# -- F19: Codex ----------------------------------------------------------------------------------

SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "local_shell"},
        {"type": "namespace", "name": "n", "tools": []},
        {"type": "image_generation"},
        {"type": "mcp", "server_label": "x"},
    ],
    ids=lambda tool: tool["type"],
)
def test_tools_that_are_no_functions_are_left_out(thinker: Server, tool: dict[str, Any]) -> None:
    made = answer(thinker, R, {"input": "hi", "max_output_tokens": 3, "tools": [SHELL, tool]})
    plain = answer(thinker, R, {"input": "hi", "max_output_tokens": 3, "tools": [SHELL]})
    assert made["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert [t["type"] for t in made["tools"]] == ["function", tool["type"]]  # as they were sent
    asks = {"input": "hi", "max_output_tokens": 3, "tools": [tool]}
    answer(thinker, R, {**asks, "tool_choice": "auto"})
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [tool, SHELL]}
    answer(thinker, R, {**asks, "tools": [SHELL, tool], "tool_choice": allowed})
    forced = {k: tool[k] for k in ("type", "name") if k in tool}
    for choice in (forced, "required", {**allowed, "mode": "required", "tools": [tool]}):
        status, found, _ = call(thinker.url, R, {**asks, "tool_choice": choice})
        assert (status, found["error"]["param"]) == (400, "tool_choice"), choice


def test_what_codex_sends(thinker: Server) -> None:
    """Hints beside the request: none of them is a reason to refuse it."""
    body = {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "developer", "content": "Work in /x."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAA", "id": "rs_1"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** x"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            {
                "type": "local_shell_call",
                "call_id": "c2",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"]},
            },
            {"type": "local_shell_call_output", "call_id": "c2", "output": "a"},
            {"type": "message", "role": "user", "content": "go on"},
        ],
        "tools": [SHELL, {"type": "web_search"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "detailed"},
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "client_metadata": {"x": "y"},
        "service_tier": "priority",
        "store": False,
        "max_output_tokens": 3,
    }
    made = answer(thinker, R, body)
    assert made["text"]["verbosity"] == "low" and made["reasoning"]["summary"] == "detailed"
    for field, value in (("text", {"verbosity": "huge"}), ("reasoning", {"summary": "all"})):
        assert call(thinker.url, R, {**body, field: value})[0] == 400


# -- references to stored items ------------------------------------------------------------------


def test_references_to_stored_items(thinker: Server) -> None:
    first = answer(thinker, R, {"input": say("<think>hm</think>Rome")["messages"]})
    thought, message = first["output"]
    asked = {"role": "user", "content": "Which city?"}
    for reference in (
        {"type": "item_reference", "id": message["id"]},
        {"id": message["id"]},
        {"id": message["id"], "type": None},
    ):
        by_name = answer(thinker, R, {"input": [asked, reference, asked], "max_output_tokens": 2})
        whole = answer(thinker, R, {"input": [asked, message, asked], "max_output_tokens": 2})
        assert by_name["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    again = [asked, {"type": "item_reference", "id": thought["id"]}, asked]
    answer(thinker, R, {"input": again, "max_output_tokens": 2})


def test_references_to_calls(thinker: Server) -> None:
    text = '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>'
    first = answer(thinker, R, {"input": say(text)["messages"], "tools": [SHELL]})
    [made] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "ok"}
    items = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": made["id"]}, result]
    answer(thinker, R, {"input": items, "tools": [SHELL], "max_output_tokens": 2})
    later = {"previous_response_id": first["id"], "input": [result], "tools": [SHELL]}
    answer(thinker, R, {**later, "max_output_tokens": 2})


def test_references_to_nothing(thinker: Server) -> None:
    kept = answer(thinker, R, {"input": say("Hi")["messages"]})
    [item] = kept["output"]
    unkept = answer(thinker, R, {"input": say("Hi")["messages"], "store": False})
    assert call(thinker.url, f"{R}/{kept['id']}/x", None)[0] == 404
    for name in ("msg_nowhere", unkept["output"][0]["id"], 5, None):
        body = {"input": [{"type": "item_reference", "id": name}]}
        status, found, _ = call(thinker.url, R, body)
        assert (status, found["error"]["param"]) == (404, "input"), found
        assert "input[0]" in found["error"]["message"]
    found = {"input": [{"type": "item_reference", "id": item["id"]}], "max_output_tokens": 2}
    assert call(thinker.url, R, found)[0] == 200


# -- F17: system turns in the middle -------------------------------------------------------------

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    with running("--chat-template", STRICT, core=SCRIPTED) as up:
        yield up


def prompt_of(up: Server, path: str, body: dict[str, Any]) -> str:
    """The prompt that the conversation becomes."""
    found = answer(up, path, {**body, "return_prompt_text": True, "max_tokens": 1})
    return str(found["prompt_text"])


def test_system_turns_in_the_middle(strict: Server) -> None:
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "Available agent types: X"},
    ]
    merged = "<system>S\n\nAvailable agent types: X<user>a<assistant>"
    assert prompt_of(strict, CC, {"messages": turns}) == merged
    body = {"system": "S", "messages": turns[1:], "max_tokens": 1}
    counted = answer(strict, f"{M}/count_tokens", body)["input_tokens"]
    answer(strict, M, body)
    whole = {"prompt": merged, "add_special_tokens": False}
    assert counted == answer(strict, "/tokenize", whole)["count"]
    developer = [{"role": r, "content": r[0]} for r in ("developer", "user", "developer", "user")]
    made = answer(strict, R, {"instructions": "I", "input": developer, "max_output_tokens": 1})
    assert made["status"] == "incomplete"
    # a template's own refusal of anything else stays what it says
    status, found, _ = call(strict.url, CC, {"messages": [{"role": "user", "content": 5}]})
    assert status == 400


@pytest.mark.parametrize(
    "name", ["mistral-nemo-instruct-2407", "mixtral-8x7b-instruct-v0.1", "llama-2-7b-chat"]
)
def test_system_turns_with_real_templates(name: str) -> None:
    with running("--chat-template", str(template(f"{name}.jinja")), core=SCRIPTED) as up:
        turns = [
            {"role": "system", "content": "S1"},
            {"role": "user", "content": "U1"},
            {"role": "system", "content": "S2"},
            {"role": "user", "content": "U2"},
        ]
        shown = prompt_of(up, CC, {"messages": turns})
        assert all(text in shown for text in ("S1", "S2", "U1", "U2"))
        twice = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
        status, found, _ = call(up.url, CC, {"messages": twice})
        assert status == 400 and "alternate" in found["error"]["message"]


# -- F47: the context overflows ------------------------------------------------------------------


def test_overflow_is_recognisable(thinker: Server) -> None:
    long = "word " * 20_000
    asks = [
        (C, {"prompt": long}),
        (C, {"prompt": [5] * 9000}),
        (CC, {"messages": [{"role": "user", "content": long}]}),
        (R, {"input": long}),
        ("/v1/embeddings", {"input": long}),
        ("/score", {"text_1": "a", "text_2": long}),
    ]
    for path, body in asks:
        status, found, _ = call(thinker.url, path, body)
        error = found["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded"), (path, error)
        assert "this model's maximum context length is 8192 tokens" in error["message"]
    body = {"messages": [{"role": "user", "content": long}], "max_tokens": 5}
    status, found, _ = call(thinker.url, M, body)
    assert status == 400 and found["error"]["message"].startswith("prompt is too long: ")


# -- F50: effort switches thinking ---------------------------------------------------------------

ASKED = (
    "{% if enable_thinking is defined and enable_thinking %}THINK{% else %}"
    "PLAIN AS EVER {% endif %}"
    "{{ messages[-1].content }}"
)


@pytest.mark.parametrize(
    "flags", [(), ("--default-chat-template-kwargs", '{"enable_thinking": false}')]
)
def test_effort_switches_thinking(flags: tuple[str, ...]) -> None:
    with running("--chat-template", ASKED, *flags, core=SCRIPTED) as up:
        turn = {"messages": [{"role": "user", "content": "x"}]}
        assert prompt_of(up, CC, turn) == "PLAIN AS EVER x"
        for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
            assert prompt_of(up, CC, {**turn, "reasoning_effort": effort}) == "THINKx"
        assert prompt_of(up, CC, {**turn, "reasoning_effort": "none"}) == "PLAIN AS EVER x"
        own = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
        assert prompt_of(up, CC, {**turn, **own}) == "PLAIN AS EVER x"
        own = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
        assert prompt_of(up, CC, {**turn, **own}) == "THINKx"

        def tokens(effort: str | None) -> int:
            body = {"input": "x", "reasoning": {"effort": effort}, "max_output_tokens": 1}
            return int(answer(up, R, body)["usage"]["input_tokens"])

        assert tokens("high") == tokens("low") != tokens("none")


# -- B17, B26, B67 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [{}, {"json_object": False}, {"regex": None}, {"disable_fallback": True}]
)
def test_a_constraint_without_a_constraint(thinker: Server, given: dict[str, Any]) -> None:
    for path, body in ((C, {"prompt": "x"}), (CC, say("x"))):
        status, found, _ = call(thinker.url, path, {**body, "structured_outputs": given})
        assert (status, found["error"]["param"]) == (400, "structured_outputs")
        assert "needs exactly one of json" in found["error"]["message"]


@pytest.mark.parametrize("number", ["9223372036854775808", "1" + "0" * 399, "1e30", "1e400"])
def test_numbers_beyond_64_bits(thinker: Server, number: str) -> None:
    for name in ("max_tokens", "min_tokens", "top_k", "logprobs", "thinking_token_budget"):
        raw = f'{{"prompt": "x", "{name}": {number}}}'.encode()
        status, found, _ = call(thinker.url, C, raw=raw)
        assert (status, found["error"]["param"]) == (400, name), found
        assert len(found["error"]["message"]) < 200
    raw = b'{"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": %s}'
    assert call(thinker.url, CC, raw=raw % number.encode())[0] == 400


def test_structured_outputs_alone_hold_beside_tools(engine_server: Server) -> None:
    """Given as response_format the answer may be calls or the form; as structured_outputs it is the
    form, whatever the tools."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    turn = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": 20}
    form = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form["additionalProperties"] = False
    for more, text in (
        ({"structured_outputs": {"json": form}}, '{"a":1}'),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        ({"guided_regex": "[a-c]{3}"}, None),
        ({"structured_outputs": {"grammar": 'start: "so"'}}, "so"),
    ):
        for seed in range(4):
            body = {**turn, **more, "temperature": 2.0, "seed": seed}
            [choice] = answer(engine_server, CC, body)["choices"]
            assert choice["finish_reason"] == "stop" and not choice["message"].get("tool_calls")
            content = choice["message"]["content"]
            assert content == text or (text is None and re.fullmatch("[a-c]{3}", content))


# -- fields of vLLM (drop-in, section A) ---------------------------------------------------------


def test_truncation_from_either_side(thinker: Server) -> None:
    ids = list(range(10, 18))
    for side, kept in ((None, ids[4:]), ("left", ids[4:]), ("right", ids[:4])):
        body = {"prompt": ids, "truncate_prompt_tokens": 4, "truncation_side": side}
        [choice] = answer(thinker, C, {**body, "max_tokens": 1, "return_token_ids": True})[
            "choices"
        ]
        assert choice["prompt_token_ids"] == kept
    status, found, _ = call(thinker.url, C, {"prompt": ids, "truncation_side": "middle"})
    assert (status, found["error"]["param"]) == (400, "truncation_side")


def test_truncation_of_a_huge_text(thinker: Server) -> None:
    """Only the end that is kept is encoded; its tokens are those of the whole text."""
    text = "one two three " * 20_000
    for side in ("left", "right"):
        body = {"prompt": text, "truncate_prompt_tokens": 6, "truncation_side": side}
        [choice] = answer(thinker, C, {**body, "max_tokens": 1, "return_token_ids": True})[
            "choices"
        ]
        part = text[-140:] if side == "left" else text[:140]
        whole = answer(thinker, "/tokenize", {"prompt": part})["tokens"]
        kept = whole[-6:] if side == "left" else whole[:6]
        assert choice["prompt_token_ids"] == kept


@pytest.mark.parametrize(
    ("field", "asks", "nothing"),
    [
        ("watermarking", True, None),
        ("return_token_offsets", True, False),
        ("return_weight_versions", True, False),
        ("ec_transfer_params", {"a": 1}, None),
        ("kv_transfer_params", {"a": 1}, None),
        ("vllm_xargs", {"a": 1}, {}),
        ("mm_payload", "full", "none"),
        ("routed_experts_prompt_start", 5, 0),
        ("repetition_detection", {"max_pattern_size": 3}, None),
        ("logprob_token_ids", [1], None),
        ("media_io_kwargs", {"image": {}}, None),
    ],
)
def test_known_fields_are_refused_by_name(
    thinker: Server, field: str, asks: Any, nothing: Any
) -> None:
    for path, body in ((C, {"prompt": "x", "max_tokens": 1}), (CC, say("x")), (R, FEW)):
        status, found, _ = call(thinker.url, path, {**body, field: asks})
        assert (status, found["error"]["param"]) == (400, field), (path, found)
        assert call(thinker.url, path, {**body, field: nothing})[0] == 200


@pytest.mark.parametrize(
    ("path", "field", "asks"),
    [
        ("/score", "instruction", "judge"),
        ("/score", "max_tokens_per_doc", 5),
        ("/score", "max_tokens_per_query", 5),
        ("/score", "use_activation", False),
        ("/v1/embeddings", "padding", "max_length"),
        ("/v1/embeddings", "embed_dtype", "fp8_e4m3"),
        ("/v1/embeddings", "embed_dtype", "float16"),
        ("/v1/embeddings", "endianness", "big"),
        ("/pooling", "task", "token_embed"),
        ("/pooling", "task", "classify"),
        ("/pooling", "task", "token_classify"),
        ("/pooling", "task", "plugin"),
        ("/pooling", "embed_dtype", "float16"),
        (R, "enable_response_messages", True),
    ],
)
def test_fields_of_other_routes_are_refused(
    thinker: Server, path: str, field: str, asks: Any
) -> None:
    body = {"text_1": "a", "text_2": "b"} if path == "/score" else {"input": "a"}
    status, found, _ = call(thinker.url, path, {**body, field: asks})
    assert (status, found["error"]["param"]) == (400, field), found


def test_fields_that_are_obeyed(thinker: Server) -> None:
    body = {"input": "x", "include_stop_str_in_output": True, "session_id": "s", "stop": ["b"]}
    made = answer(thinker, R, {**body, "input": say("ab")["messages"], "request_id": "mine"})
    assert made["output"][0]["content"][0]["text"] == "ab"
    assert prompt_of(thinker, CC, say("x")).startswith("<|im_start|>user\nSAY:")
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
    every = chunks(thinker.url, C, body)
    fewer = chunks(thinker.url, C, {**body, "stream_interval": 10})
    assert len(fewer) < len(every) / 2
    made = answer(thinker, "/v1/embeddings", {"input": "x", "request_id": "mine"})
    assert made["id"] == "embd-mine"


def test_priorities_need_a_scheduler_that_has_them(thinker: Server) -> None:
    for path, body in ((C, {"prompt": "x"}), (CC, say("x")), ("/v1/embeddings", {"input": "x"})):
        status, found, _ = call(thinker.url, path, {**body, "priority": 3})
        assert (status, found["error"]["param"]) == (400, "priority"), found
        assert call(thinker.url, path, {**body, "priority": 0})[0] == 200


def test_usage_in_every_chunk_by_force_and_a_root_path() -> None:
    """A14, A5: below the root path and without it."""
    with running("--enable-force-include-usage", "--root-path", "/llm") as up:
        found = chunks(up.url, C, {"prompt": "x", "max_tokens": 3})
        counts = [c["usage"]["completion_tokens"] for c in found]
        assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 3
        found = chunks(
            up.url, CC, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        )
        assert all(c["usage"]["prompt_tokens"] > 0 for c in found)
        assert up.url.endswith("/llm")
        bare = up.url.removesuffix("/llm")
        for url in (up.url, bare):
            assert call(url, "/health")[0] == 200
            assert call(url, C, {"prompt": "x", "max_tokens": 1})[0] == 200
            assert call(url, M, {})[1]["type"] == "error"
        assert call(bare, "/llmx/health")[0] == 404
        assert metric(up.url, "request_success_total") >= 2


def test_events_of_messages_end_at_a_stop(thinker: Server) -> None:
    body = {**say(THOUGHT), "max_tokens": 99, "stop_sequences": ["Q:"]}
    data = json.dumps({**body, "stream": True}).encode()
    status, text, _ = call(thinker.url, M, raw=data)
    assert status == 200 and '"stop_sequence":"Q:"' in text and '"text":"Q:' not in text
    assert events(thinker.url, CC, say("x"))[-1] == "[DONE]"
