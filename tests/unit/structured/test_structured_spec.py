"""The checks that need no compiling."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured import check_structured, from_response_format
from jaxengine.structured import schema as schema_module
from jaxengine.structured.finite import is_finite
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


def deep(levels: int) -> Any:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


ODD = {
    "a number beyond 64 bits": 10**30,
    "a number without end": 10**5000,
    "not a number": float("nan"),
    "infinite": float("-inf"),
    "half a character": "\ud800",
    "nested deep": deep(100_000),
    "a list": [0] * 100_000,
    "an object": {},
    "bytes": b"x",
}


def tag_of(value: Any, place: str) -> dict[str, Any]:
    """A structural tag with an odd value somewhere."""
    schema = {"type": "integer", "default": value} if place == "default" else {"type": "integer"}
    tag: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    tag |= {place: value} if place in ("type", "json_schema", "more") else {}
    return {"format": tag, **({"triggers": value} if place == "triggers" else {})}


@pytest.mark.parametrize("name", ODD)
def test_odd_values_are_written_as_text_or_refused_with_a_sentence(name: str) -> None:
    """H1: of every kind, in every place; what passes is text, whatever was given."""
    value = ODD[name]
    constraints: list[dict[str, Any]] = [
        *({"structural_tag": tag_of(value, place)} for place in ("default", "type", "json_schema")),
        *({"structural_tag": tag_of(value, place)} for place in ("more", "triggers")),
        *({"json": found} for found in (value, {"default": value}, {"enum": [value]})),
        *({kind: value} for kind in ("regex", "choice", "grammar", "structural_tag")),
        {"choice": ["a", value]},
        {"json_object": value},
    ]
    for fields in constraints:
        try:
            spec = check_structured(StructuredOutputsParams(**fields))
        except ValueError as error:
            text = str(error)
            assert text.startswith("structured_outputs.") and len(text) < 400
            assert text.isprintable() and text.encode()
            continue
        assert spec is not None and spec.text.encode()
        kind = next(iter(fields))
        if kind in ("json", "structural_tag"):
            assert spec.given is not None and spec.given.encode()
            again = check_structured(StructuredOutputsParams(**{kind: spec.given}))
            assert again == spec and again is not None and again.given == spec.given
        else:
            assert spec.given is None


def test_a_structural_tag_keeps_its_order_and_its_numbers() -> None:
    """H1: as text it can travel, and says the same."""
    schema = {"type": "integer", "maximum": 10**30, "default": 10**30, "title": "é"}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for given in (tag, json.dumps(tag)):
        spec = check_structured(StructuredOutputsParams(structural_tag=given))
        assert spec is not None and spec.given is not None
        assert json.loads(spec.given) == tag and "é" in spec.given
        assert spec.given.index("maximum") < spec.given.index("default") < spec.given.index("title")
        assert str(10**30) in spec.text
    asked = from_response_format(tag)
    assert asked == StructuredOutputsParams(structural_tag=spec.given)


HUGE: list[Callable[[], dict[str, Any]]] = [
    lambda: {"json": {"description": "x" * 32_000_000}},
    lambda: {"json": {"enum": [0] * 3_000_000}},
    lambda: {"json": {"enum": [[]] * 3_000_000}},
    lambda: {"json": {"properties": {f"p{i}": {} for i in range(300_000)}}},
    lambda: {"structural_tag": {"format": {"type": "const_string", "value": "x" * 32_000_000}}},
    lambda: {
        "structural_tag": {"format": {"type": "or", "elements": [{"type": "any_text"}] * 2_000_000}}
    },
    lambda: {"structural_tag": '{"format": "' + "x" * 32_000_000 + '"}'},
    lambda: {"structural_tag": {"structures": [{"begin": "a"}] * 1_000_000, "triggers": ["a"]}},
    lambda: {"grammar": " " * 32_000_000},
    lambda: {"choice": ["a" * 1000] * 10_000},
]


@pytest.mark.parametrize("number", range(len(HUGE)))
def test_what_is_too_large_is_refused_before_any_work(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither written nor read: its size is found on the way through, and no further."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("too late")

    fields = HUGE[number]()
    monkeypatch.setattr(schema_module.json, "dumps", never)
    monkeypatch.setattr(schema_module.json, "loads", never)
    with pytest.raises(ValueError, match=r"^structured_outputs\.\w+(\[0\])? .*(limit|longer)"):
        check_structured(StructuredOutputsParams(**fields))


def test_many_triggers_are_refused() -> None:
    """Each would be compared with every tag."""
    tag = {"begin": "a", "content": {"type": "any_text"}, "end": "b"}
    form = {"type": "triggered_tags", "triggers": [f"{i}" for i in range(5000)], "tags": [tag] * 9}
    with pytest.raises(ValueError, match="triggers has 5000 entries, above the limit 1024"):
        check_structured(StructuredOutputsParams(structural_tag={"format": form}))


def test_a_long_way_to_a_finite_value_is_found() -> None:
    """Each level needs the next, in an order in which nothing is known of it yet."""
    count = 300
    defs: dict[str, Any] = {f"d{count}": {"type": "object"}}
    for i in range(count):
        back = {"$ref": f"#/$defs/d{max(0, i - 1)}"}
        ahead = {"$ref": f"#/$defs/d{i + 1}"}
        needs = {"type": "object", "properties": {"b": back, "n": ahead}, "required": ["n"]}
        defs[f"d{i}"] = needs
    defs[f"d{count}"]["properties"] = {"b": {"$ref": f"#/$defs/d{count - 1}"}}
    start = {"$ref": f"#/$defs/d{count}"}
    assert parse_schema({"type": "object", "properties": {"x": start}, "$defs": defs}, "s")
    first = {"$ref": "#/$defs/d0"}
    assert parse_schema({"allOf": [{"properties": {"x": start}}, first], "$defs": defs}, "s")


SCHEMAS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", "string", ["object", "array"], ["array"]]),
        "$ref": st.integers(0, 5),
        "allOf": st.lists(st.integers(0, 5), min_size=1, max_size=2),
        "anyOf": st.lists(st.one_of(st.integers(0, 5), st.just(True)), min_size=1, max_size=3),
        "oneOf": st.lists(st.integers(0, 5), min_size=1, max_size=2),
        "required": st.lists(st.sampled_from("ab"), max_size=2),
        "properties": st.dictionaries(st.sampled_from("ab"), st.integers(0, 5)),
        "additionalProperties": st.integers(0, 5),
        "items": st.integers(0, 5),
        "minItems": st.integers(0, 2),
        "const": st.just(1),
    },
)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.lists(SCHEMAS, min_size=6, max_size=6))
def test_finite_is_what_can_be_written_down_in_some_depth(drawn: list[dict[str, Any]]) -> None:
    """Against the definition, level by level: what ends within n levels, for growing n."""
    nodes: list[dict[str, Any]] = [{} for _ in drawn]

    def linked(key: str, value: Any) -> Any:
        if isinstance(value, bool) or key in ("$ref", "type", "required", "minItems", "const"):
            return value
        if isinstance(value, list):
            return [linked(key, part) for part in value]
        if isinstance(value, dict):
            return {name: linked(key, part) for name, part in value.items()}
        return nodes[value]

    for node, given_ in zip(nodes, drawn, strict=True):
        node |= {key: linked(key, value) for key, value in given_.items()}
    ended: set[int] = set()
    for _ in nodes:
        ended = {id(node) for node in nodes if _ends(node, nodes, ended)}

    def target(node: dict[str, Any]) -> list[Any]:
        return [nodes[node["$ref"]]] if "$ref" in node else []

    for node in nodes:
        assert is_finite(node, nodes, target) == (id(node) in ended)


def _ends(node: dict[str, Any], nodes: list[dict[str, Any]], ended: set[int]) -> bool:
    def ok(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in ended

    parts = [*([nodes[node["$ref"]]] if "$ref" in node else []), *node.get("allOf", [])]
    if not all(map(ok, parts)):
        return False
    if not all(any(map(ok, node[key])) for key in ("anyOf", "oneOf") if key in node):
        return False
    kinds = node.get("type", "string")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "const" in node or "string" in kinds:
        return True
    named, other = node.get("properties", {}), node.get("additionalProperties")
    as_object = all(ok(named.get(name, other)) for name in node.get("required", []))
    as_array = node.get("minItems", 0) == 0 or ok(node.get("items"))
    return ("object" in kinds and as_object) or ("array" in kinds and as_array)
