"""Structural tags: their grammar takes what it should and nothing else."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured import check_structured, from_response_format
from jaxengine.structured.probe import BYTES, ByteTokenizer, build, limits
from jaxengine.structured.structural_tag import structural_tag_grammar

SMALL: Any = ByteTokenizer()
TOKENIZER = llguidance.LLTokenizer(SMALL, eos_token=[BYTES])
INTEGER = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "array"}, "end": "</f>"},
        {"begin": "[go](", "schema": True, "end": ")"},
    ],
    "triggers": ["<f=", "[go"],
}
CALL = {"begin": "<", "content": {"type": "regex", "pattern": "a/b+"}, "end": [">", "!"]}
DIGITS = {"type": "json_schema", "json_schema": {"type": "integer"}}
THINK = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}


def triggered(**more: Any) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [CALL], **more}}


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return {"format": {"type": kind, **fields}}


def walk(tag: dict[str, Any], text: str) -> tuple[bool, bool]:
    """Whether all of `text` is legal, and whether it may end there."""
    grammar = structural_tag_grammar(tag, "tag")
    assert "error" not in build(TOKENIZER, "grammar", grammar)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0, limits=limits())
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (TAGS, "just <text> [g"),
        (TAGS, 'a <f=a>{"x":3}</f>, <f=b>[1,{}]</f>\nb [go]("x") end'),
        (triggered(), "x <a/b> <a/bbb! y"),
        (triggered(stop_after_first=True), "x <a/b>"),
        (triggered(at_least_one=True), "<a/b>"),
        (form("sequence", elements=[THINK, DIGITS]), "<t>a < b\n</t>12"),
        (form("or", elements=[DIGITS, {"type": "const_string", "value": "no/.\n"}]), "no/.\n"),
        (form("tags_with_separator", tags=[CALL], separator=", "), "<a/b>, <a/b>"),
        (form("tags_with_separator", tags=[CALL], separator=", "), ""),
    ],
)
def test_what_is_legal(tag: dict[str, Any], text: str) -> None:
    assert walk(tag, text) == (True, True)


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (TAGS, "<f=c>"),
        (TAGS, '<f=a>{"y"'),
        (TAGS, '<f=a>{"x":3}</g'),
        (triggered(), "a < b"),
        (triggered(stop_after_first=True), "<a/b> "),
        (form("sequence", elements=[THINK, DIGITS]), "12"),
        (form("or", elements=[DIGITS, {"type": "const_string", "value": "a.c"}]), "abc"),
        (form("tags_with_separator", tags=[CALL], separator=", "), "<a/b> <"),
    ],
)
def test_what_is_not(tag: dict[str, Any], text: str) -> None:
    assert not walk(tag, text)[0]


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (TAGS, '<f=a>{"x":1}</f'),
        (triggered(at_least_one=True), "no tag"),
        (form("tags_with_separator", tags=[CALL], separator=", ", at_least_one=True), ""),
        (form("sequence", elements=[THINK, DIGITS]), "<t>for ever"),
    ],
)
def test_where_it_may_not_end(tag: dict[str, Any], text: str) -> None:
    assert walk(tag, text) == (True, False)


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ("{", "is not valid JSON"),
        (3, "must be an object, got int"),
        ({}, 'needs "format", or "structures" and "triggers"'),
        ({**TAGS, "more": 1}, "and no more"),
        ({**TAGS, "triggers": []}, "triggers must be a list"),
        ({**TAGS, "triggers": ["<f="]}, "begins with none of the triggers"),
        ({**TAGS, "triggers": ["<f=", "[go", "x"]}, "'x' begins none of the tags"),
        ({**TAGS, "structures": [{"begin": "<f="}]}, "structures[0] must have begin, schema"),
        (form("xml"), "format.type must be one of const_string"),
        (form("const_string"), "format.value must be a string"),
        (form("json_schema"), "format.json_schema is missing"),
        (form("json_schema", json_schema=False), "format.json_schema is false"),
        (form("any_text", excludes=["x"]), "format.excludes is not supported"),
        (form("sequence", elements=[{"type": "any_text"}, DIGITS]), "nothing would end it"),
        (form("tag", begin="<", content={"type": "any_text"}, end=""), "must not be empty"),
        (form("tag", begin="<", content=triggered()["format"], end=">"), "nothing would end it"),
        (form("tag", begin="<", content=DIGITS, end=3), "end must be a string, or a list"),
        (triggered(tags=[{"begin": "<", "content": DIGITS, "end": ">", "x": 1}]), "must be a tag"),
    ],
)
def test_bad_ones_name_the_part(tag: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="^tag") as caught:
        structural_tag_grammar(tag, "tag")
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_depth_and_number_are_limited() -> None:
    deep: dict[str, Any] = DIGITS
    for _ in range(20):
        deep = {"type": "sequence", "elements": [deep]}
    with pytest.raises(ValueError, match="nested deeper than 16"):
        structural_tag_grammar({"format": deep}, "tag")
    wide = form("or", elements=[DIGITS] * 2000)
    with pytest.raises(ValueError, match="more than 1024 formats"):
        structural_tag_grammar(wide, "tag")


def test_both_fields_make_the_same_grammar() -> None:
    first = check_structured(from_response_format(TAGS))
    for given in (TAGS, json.dumps(TAGS)):
        second = check_structured(StructuredOutputsParams(structural_tag=given))
        assert first is not None and second is not None
        assert first.key == second.key and second.field == "structured_outputs.structural_tag"
