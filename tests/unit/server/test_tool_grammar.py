"""The constraints that tools and reasoning make, held against text by the grammar library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import llguidance
import pytest

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.server.answer.tool_grammar import after_reasoning, enforced_calls, free_calls
from jaxengine.server.answer.tools import ToolChoice
from jaxengine.server.errors import ApiError
from jaxengine.structured.probe import BYTES, ByteTokenizer, build, limits

_small: Any = ByteTokenizer()
TOKENIZER = llguidance.LLTokenizer(_small, eos_token=[BYTES])


def fits(constraint: StructuredOutputsParams, text: str) -> bool:
    """Whether the constraint lets an answer be exactly `text`."""
    kind = "json" if constraint.json is not None else "grammar"
    built = build(TOKENIZER, kind, str(constraint.json or constraint.grammar))
    assert "error" not in built, built
    matcher = llguidance.LLMatcher(TOKENIZER, built["grammar"], log_level=0, limits=limits())
    data = text.encode()
    return bool(matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting())


def tool(name: str, strict: bool | None, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "$defs": {"X": {"type": "integer"}},
    }
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "strict": strict},
    }


TOOLS = (tool("f", True, a={"$ref": "#/$defs/X"}), tool("g", None, enum={"type": "string"}))
REQUIRED = ToolChoice("required", TOOLS, TOOLS)
AUTO = ToolChoice("auto", TOOLS, TOOLS)
F = '{"name":"f","parameters":{"a":1}}'
G = '{"name":"g","parameters":{"enum":"x"}}'


def test_b67_required_calls_follow_their_schemas() -> None:
    made = enforced_calls(REQUIRED)
    assert fits(made, f"[{F}]") and fits(made, f"[{F},{G}]")
    for wrong in ("[]", F, "text", f"[{F.replace('1', '"1"')}]", f"[{G.replace('"g"', '"f"')}]"):
        assert not fits(made, wrong), wrong
    single = enforced_calls(replace(REQUIRED, parallel=False))
    assert fits(single, f"[{G}]") and not fits(single, f"[{F},{G}]")


def test_named_function() -> None:
    made = enforced_calls(ToolChoice("named", TOOLS[:1], TOOLS))
    assert fits(made, '{"a":1}') and not fits(made, "{}") and not fits(made, F)
    bare = {"type": "function", "function": {"name": "h"}}
    assert fits(enforced_calls(ToolChoice("named", (bare,))), "{}")


def test_required_calls_after_reasoning() -> None:
    made = enforced_calls(REQUIRED)
    inside = after_reasoning(made, "inside", False)
    assert fits(inside, f"hm [1] </thi\n</think>\n\n[{F}]")
    assert not fits(inside, f"[{F}]") and not fits(inside, "hm</think>x")
    maybe = after_reasoning(made, "maybe", False)
    assert fits(maybe, f"<think>\nhm</think>\n[{F}]") and fits(maybe, f"[{F}]")
    assert after_reasoning(made, "outside", False) is made


CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
CALL_G = '<tool_call>{"name": "g", "arguments": {"any":[1]}}</tool_call>'
WRONG_F = CALL_F.replace("1", '"x"')
ANSWER = StructuredOutputsParams(json='{"properties":{"z":{"type":"integer"}},"required":["z"]}')


def test_strict_tools_beside_free_text() -> None:
    made = free_calls(AUTO, None, "hermes")
    for good in ("", "text only <tool", f"So: {CALL_F}\n{CALL_G} bye", CALL_G):
        assert fits(made, good), good
    for wrong in (WRONG_F, f"{CALL_G} {WRONG_F}", "<tool_call>", CALL_F.replace('"f"', '"q"')):
        assert not fits(made, wrong), wrong
    single = free_calls(replace(AUTO, parallel=False), None, "qwen3")
    assert fits(single, CALL_F) and not fits(single, f"{CALL_F}{CALL_G}")
    after = after_reasoning(made, "inside", True)
    assert fits(after, f"hm <tool_call> x</think>\nSo {CALL_F}") and not fits(after, CALL_F)


def test_calls_or_an_answer_of_a_form() -> None:
    made = free_calls(AUTO, ANSWER, "hermes")
    assert fits(made, '{"z":1}') and fits(made, f"{CALL_G}\n{CALL_F}")
    assert not fits(made, "text") and not fits(made, '{"z":"1"}') and not fits(made, WRONG_F)


def test_llama_calls() -> None:
    spaced = F.replace(":", ": ", 1).replace(',"p', ', "p').replace('s":', 's": ')
    made = free_calls(AUTO, None, "llama3_json")
    assert fits(made, "") and fits(made, "text") and fits(made, f"{spaced}; {spaced}")
    assert not fits(made, "{") and not fits(made, spaced.replace("1", '"x"'))
    with pytest.raises(ApiError, match="cannot be enforced with the parser llama3_json"):
        free_calls(AUTO, ANSWER, "llama3_json")


@pytest.mark.parametrize(
    ("constraint", "good", "wrong"),
    [
        (StructuredOutputsParams(regex=r"a/b\/c\d+"), "a/b/c12", "a/b/c"),
        (StructuredOutputsParams(choice=["yes", 'né"e😀']), 'né"e😀', "no"),
        (StructuredOutputsParams(json_object=True), '{"q":[1]}', "[1]"),
        (StructuredOutputsParams(json={"type": "integer"}), "12", "x"),
    ],
)
def test_forms_after_reasoning(constraint: StructuredOutputsParams, good: str, wrong: str) -> None:
    made = after_reasoning(constraint, "inside", False)
    assert fits(made, f"hm {wrong}</think>\n\n{good}")
    assert not fits(made, f"hm {good}</think>\n\n{wrong}") and not fits(made, good)


def test_what_cannot_be_enforced_is_refused() -> None:
    own = StructuredOutputsParams(grammar='start: "x"')
    with pytest.raises(ApiError, match=r"structured_outputs\.grammar cannot begin after"):
        after_reasoning(own, "inside", False)
    with pytest.raises(ApiError, match=r"structured_outputs\.grammar cannot stand beside"):
        free_calls(AUTO, own, "hermes")
    odd = tool("f", True, a={"x-guidance": {}})
    with pytest.raises(ApiError, match="parameters of the function 'f' in tools uses 'x-guid"):
        enforced_calls(ToolChoice("required", (odd,)))
