"""The checks that need no compiling."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured import check_structured, from_response_format
from jaxengine.structured.schema import MAX_BYTES, MAX_DEPTH, parse_schema

OBJECT = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b"]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_response_formats() -> None:
    assert from_response_format(None) is None
    assert from_response_format({"type": "text"}) is None
    anything = from_response_format({"type": "json_object"})
    assert anything == StructuredOutputsParams(json_object=True)
    for schema in (OBJECT, json.dumps(OBJECT)):
        wrapper = {"name": "x", "strict": True, "schema": schema}
        params = from_response_format({"type": "json_schema", "json_schema": wrapper})
        spec = check_structured(params)
        assert spec is not None and spec.kind == "json" and json.loads(spec.text) == OBJECT
    free = from_response_format({"type": "json_schema", "json_schema": {"schema": True}})
    assert free == StructuredOutputsParams(json="{}")
    closed = from_response_format({"type": "json_object", "schema": OBJECT})
    assert closed is not None and closed.json is not None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("json_object", "response_format must be an object"),
        ({}, "response_format.type"),
        ({"type": "grammar"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema is missing"),
        ({"type": "json_schema", "json_schema": []}, "response_format.json_schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema is missing"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, "must be a JSON object, got int"),
        ({"type": "json_schema", "json_schema": {"schema": "{"}}, "is not valid JSON"),
        ({"type": "json_schema", "json_schema": {"schema": False}}, "no value satisfies it"),
    ],
)
def test_bad_response_formats_name_the_field(given: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"^response_format") as caught:
        from_response_format(given)
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "exactly one of"),
        ({"json_object": False}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"choice": []}, "structured_outputs.choice must not be empty"),
        ({"choice": ["a", ""]}, "structured_outputs.choice[1] must not be empty"),
        ({"choice": "ab"}, "structured_outputs.choice must be a list"),
        ({"choice": ["a", 3]}, "structured_outputs.choice[1] must be a string"),
        ({"choice": ["a"] * 10_001}, "above the limit"),
        ({"regex": ""}, "structured_outputs.regex must not be empty"),
        ({"regex": "a\0b"}, "structured_outputs.regex must not hold a NUL"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a" * 20_000}, "above the limit"),
        ({"grammar": " \n"}, "structured_outputs.grammar must not be empty"),
        ({"json": nested(MAX_DEPTH + 1)}, f"nested deeper than {MAX_DEPTH}"),
        ({"json": "[" * 100_000}, "nested deeper than"),
        ({"json": {"description": "x" * MAX_BYTES}}, "above the limit"),
        ({"json": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"json": {"const": "\udc00"}}, "lone surrogate"),
        ({"json": {1: {}}}, "a key that is not a string"),
        ({"json": [{}]}, "must be a JSON object, got list"),
    ],
)
def test_bad_params_name_the_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=r"^structured_outputs") as caught:
        check_structured(StructuredOutputsParams(**fields))
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_equal_constraints_share_a_key_and_order_counts() -> None:
    def key(schema: Any) -> object:
        spec = check_structured(StructuredOutputsParams(json=schema))
        assert spec is not None
        return spec.key

    assert key(OBJECT) == key(json.dumps(OBJECT, indent=2))
    turned = {**OBJECT, "properties": {"a": {}, "b": {}}}
    assert key(OBJECT) != key(turned)
    assert check_structured(None) is None


def test_depth_at_the_limit_is_fine() -> None:
    assert parse_schema(nested(MAX_DEPTH - 1), "s")


def test_long_chains_and_rings_of_references_are_checked_in_bounded_time() -> None:
    count = 8000
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    chain[f"d{count}"] = {"type": "integer"}
    start = time.thread_time()
    assert parse_schema({"$ref": "#/$defs/d0", "$defs": chain}, "s")
    ring = {**chain, f"d{count}": {"$ref": "#/$defs/d0"}}
    with pytest.raises(ValueError, match="back to itself"):
        parse_schema({"$ref": "#/$defs/d0", "$defs": ring}, "s")
    assert time.thread_time() - start < 5


def test_recursion_that_can_end_is_fine_and_that_cannot_is_not() -> None:
    def tree(required: list[str], child: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "properties": {"n": child}, "required": required}

    me = {"$ref": "#"}
    assert parse_schema(tree([], me), "s")
    assert parse_schema(tree(["n"], {"anyOf": [{"type": "null"}, me]}), "s")
    assert parse_schema(tree(["n"], {"type": "array", "items": me}), "s")
    for child in (me, {"type": "array", "items": me, "minItems": 1}, {"allOf": [me]}):
        with pytest.raises(ValueError, match="no finite value"):
            parse_schema(tree(["n"], child), "s")
