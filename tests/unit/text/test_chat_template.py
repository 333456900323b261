"""Chat templates of released models against recorded renderings, and message normalisation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import testdata

from jaxengine.text.chat_template import (
    ChatTemplateError,
    normalize_messages,
    pick_template,
    render_chat,
    render_messages,
    takes_content_parts,
    takes_tools,
)

NAMES = sorted(
    [p.name.removesuffix(".cases.json") for p in (testdata.DATA / "templates").glob("*.cases.json")]
    + list(testdata.RESTRICTED["templates"])
)


def _load(name: str) -> tuple[str, dict[str, Any]]:
    """A template and its cases."""
    data = json.loads(testdata.template(f"{name}.cases.json").read_text(encoding="utf-8"))
    return testdata.template(data["template_file"]).read_bytes().decode("utf-8"), data


def _params() -> Iterator[Any]:
    """One for each case of the templates that are here, one skipped for each other template."""
    for name in NAMES:
        if testdata.located("templates", f"{name}.cases.json") is None:
            skipped = pytest.mark.skip(reason=f"{testdata.NOT_HERE}: templates/{name}.jinja")
            yield pytest.param("", {}, {}, id=name, marks=skipped)
            continue
        text, data = _load(name)
        for case in data["cases"]:
            yield pytest.param(text, data, case, id=f"{name}-{case['name']}")


CASES = list(_params())


def _variables(data: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    now = datetime.fromisoformat(data["now"])
    return {
        "tools": case.get("tools"),
        "add_generation_prompt": case["add_generation_prompt"],
        "bos_token": data["bos_token"],
        "eos_token": data["eos_token"],
        "strftime_now": now.strftime,
        **case.get("kwargs", {}),
    }


@pytest.mark.parametrize(("template", "data", "case"), CASES)
def test_recorded_rendering(template: str, data: dict[str, Any], case: dict[str, Any]) -> None:
    messages = case.get("messages_for_template", case["messages"])
    variables = _variables(data, case)
    if "expected" in case:
        assert render_chat(template, messages, **variables) == case["expected"]
    else:
        with pytest.raises(ChatTemplateError) as error:
            render_chat(template, messages, **variables)
        assert case["expected_error"] in str(error.value)


# arguments that stay text are not what the wire format normalises to
FROM_WIRE = [c for c in CASES if not str(c.id).endswith("args_string")]


@pytest.mark.parametrize(("template", "data", "case"), FROM_WIRE)
def test_request_rendering(template: str, data: dict[str, Any], case: dict[str, Any]) -> None:
    """As a request goes: arguments are JSON text on the wire, null content is empty."""
    messages = json.loads(json.dumps(case["messages"]))
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    variables = _variables(data, case)
    better = case.get("if_null_is_made_empty", case)
    calls = [c["function"] for m in messages for c in m.get("tool_calls") or ()]
    if any(c["name"] not in better.get("expected", c["name"]) for c in calls):
        shown = render_messages(template, messages, **variables)  # B21: the call is there
        arguments = [json.dumps(json.loads(c["arguments"]), ensure_ascii=False) for c in calls]
        assert all(c["name"] in shown for c in calls) and all(a in shown for a in arguments)
    elif "expected" in better:
        assert render_messages(template, messages, **variables) == better["expected"]
    elif not case.get("policy_dependent"):
        with pytest.raises(ChatTemplateError, match="."):
            render_messages(template, messages, **variables)
    elif case["name"] == "no_tools_given" or "NoneType" in case["expected_error"]:
        with pytest.raises(ChatTemplateError, match="the chat template failed"):
            render_messages(template, messages, **variables)
    else:  # arguments pasted as text: the fallback renders
        assert messages[0]["content"] in render_messages(template, messages, **variables)


@pytest.mark.parametrize("name", NAMES)
def test_content_parts_detection(name: str) -> None:
    template, data = _load(name)
    assert takes_content_parts(template) == data["template_handles_content_parts"]


def test_content_parts_detection_positive() -> None:
    loop = "{% for p in m['content'] %}{{ p.text }}{% endfor %}"
    assert takes_content_parts("{% for m in messages %}" + loop + "{% endfor %}")
    alias = "{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}"
    assert takes_content_parts("{% for m in messages %}" + alias + "{% endfor %}")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    kept = normalize_messages(parts, keep_parts=True)[0]["content"]
    assert kept == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = "{% for m in messages %}" + loop + "{% endfor %}"
    assert render_messages(template, parts) == "ab"


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TOOL_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls is defined %}"
    "{% for c in m.tool_calls %}[{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
    " {{ c.function.arguments | tojson }}]{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_b21_empty_content_is_one_thing(content: Any) -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    if content == "absent":
        del turn["content"]
    messages = [
        {"role": "user", "content": "q"},
        turn,
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    text = render_messages(TOOL_TEMPLATE, messages)
    assert text == '<user>q<assistant>[f a=1 {"a": 1}]<tool>42'
    assert turn["tool_calls"] == [CALL]  # the caller's messages stay as they were


@pytest.mark.parametrize("calls", [[], None])
def test_b21_empty_tool_calls_are_absent(calls: Any) -> None:
    message = {"role": "assistant", "content": "hi", "tool_calls": calls}
    assert normalize_messages([message]) == [{"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"a":1}', {"a": 1}),
        ("{}", {}),
        ("", {}),
        (None, {}),
        ("null", {}),
        ({"b": [1]}, {"b": [1]}),
        ('{"città":"Zürich 😀"}', {"città": "Zürich 😀"}),
    ],
)
def test_b22_arguments_become_mappings(arguments: Any, parsed: dict[str, Any]) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    out = normalize_messages(messages)[0]["tool_calls"][0]["function"]["arguments"]
    assert out == parsed
    assert json.dumps(parsed, ensure_ascii=False) in render_messages(TOOL_TEMPLATE, messages)


@pytest.mark.parametrize("arguments", ["{bad", "[1]", "3", [1], '"x"'])
def test_b22_bad_arguments_name_the_field(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ChatTemplateError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arg"):
        normalize_messages(
            [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
        )


def test_arguments_pasted_as_text_fall_back_to_json() -> None:
    template = "{{ 'call ' + messages[0].tool_calls[0].function.arguments }}"
    assert render_messages(template, [{"role": "assistant", "tool_calls": [CALL]}]) == (
        'call {"a": 1}'
    )


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one"),
        ("hi", "must be a list"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text is supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], "with a text"),
        ([{"role": "user", "content": [7]}], "with a text"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\]\.function"),
    ],
)
def test_bad_messages(messages: Any, match: str) -> None:
    with pytest.raises(ChatTemplateError, match=match):
        normalize_messages(messages)


def test_b21_calls_where_content_must_be_null() -> None:
    """The template of DeepSeek-R1 passes over calls beside content, be it empty."""
    template, data = _load("deepseek-r1-distill-llama-8b")
    recorded = {c["name"]: c for c in data["cases"]}
    case = next(c for n, c in recorded.items() if n.endswith("args_string") and "expected" in c)
    messages = json.loads(json.dumps(case["messages"]))
    for message in messages:
        if message.get("tool_calls"):
            message["content"] = ""
    assert render_messages(template, messages, **_variables(data, case)) == case["expected"]


def test_b21_calls_in_templates_without_calls() -> None:
    messages = [{"role": "assistant", "content": "So", "tool_calls": [CALL]}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = 'So\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert render_messages(template, messages) == text


def test_roles_and_fields_as_the_template_knows_them() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{% endfor %}"
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning": "hm"},
    ]
    assert render_messages(template, messages) == "<system><assistant>hm"
    assert render_messages("{# developer #}" + template, messages).startswith("<developer>")
    thinking = "{% for m in messages %}[{{ m.thinking }}]{% endfor %}"
    assert render_messages(thinking, messages) == "[][hm]"


WITHOUT_TOOLS = {
    "deepseek-r1-distill-llama-8b",
    "gemma-2-2b-it",
    "llama-2-7b-chat",
    "mixtral-8x7b-instruct-v0.1",
    "phi-3.5-mini-instruct",
}


@pytest.mark.parametrize("name", NAMES)
def test_which_templates_take_tools(name: str) -> None:
    assert takes_tools(_load(name)[0]) == (name not in WITHOUT_TOOLS)


def test_named_templates() -> None:
    both = {"default": "D", "tool_use": "T"}
    tools = [{"type": "function"}]
    assert pick_template(both) == "D"
    assert pick_template(both, tools=tools) == "T"
    assert pick_template(both, "default", tools) == "D"
    assert pick_template({"default": "D"}, tools=tools) == "D"
    with pytest.raises(
        ChatTemplateError, match="no chat template 'rag' .it has: default, tool_use"
    ):
        pick_template(both, "rag")
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        pick_template(None)


def test_sandbox_keeps_python_out() -> None:
    attack = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ChatTemplateError, match="unsafe"):
        render_chat(attack, [{"role": "user", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="unsafe"):
        render_chat("{{ messages.append(1) }}", [{"role": "user", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="failed"):
        render_chat("{% for i in range(99999999) %}{% endfor %}", [])


def test_template_errors_are_one_sentence() -> None:
    with pytest.raises(ChatTemplateError, match="^no system role$"):
        render_chat("{{ raise_exception('no system role') }}", [])
    with pytest.raises(ChatTemplateError, match="not valid"):
        render_chat("{% for %}", [])
    with pytest.raises(ChatTemplateError, match="'x' is undefined"):
        render_chat("{{ x.y }}", [])


def test_environment() -> None:
    text = (
        "{%- generation %}\nA{% endgeneration %}{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}"
    )
    assert render_chat(text, []) == "A1"
    assert render_chat("{{ {'é': '<&>'} | tojson }}", []) == '{"é": "<&>"}'
    assert render_chat("{{ [1] | tojson(indent=2) }}", []) == "[\n  1\n]"
    assert render_chat("{{ strftime_now('%Y') }}", []) == f"{datetime.now():%Y}"
    assert render_chat("{{ bos_token }}|{{ tools }}|{{ x }}", [], x=3) == "|None|3"


@pytest.mark.parametrize("content", ["So far", "So far ", [{"type": "text", "text": "So far"}]])
def test_continue_final_message(content: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    text = render_messages(
        template, messages, add_generation_prompt=False, continue_final_message=True
    )
    tail = " " if content == "So far " else ""
    assert text == "<user>q</><assistant>So far" + tail
    trims = template.replace("m.content", "m.content | trim")
    kept = {"add_generation_prompt": False, "continue_final_message": True}
    assert render_messages(trims, messages, **kept) == "<user>q</><assistant>So far"


def test_continue_final_message_refusals() -> None:
    messages = [{"role": "assistant", "content": "x"}]
    with pytest.raises(ChatTemplateError, match="exclude"):
        render_chat("x", messages, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="does not show"):
        render_chat("x", messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="needs a last message"):
        render_chat("x", [], add_generation_prompt=False, continue_final_message=True)
