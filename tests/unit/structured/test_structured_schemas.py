"""Every schema is enforced (samples pass an independent validator) or refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from structured_walk import (
    VOCABULARIES,
    byte_vocabulary,
    demo_vocabulary,
    legal_ids,
    ready_matcher,
    walk,
)

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured import check_structured
from jaxengine.structured.spec import Spec

SAMPLES = 50


def spec_of(**fields: Any) -> Spec:
    spec = check_structured(StructuredOutputsParams(**fields))
    assert spec is not None
    return spec


def obj(required: list[str], /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


INT, STR, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
ENUM = {"enum": ["é", "日本", 'a"b', "\n"]}
STEPS = {
    **obj(["steps"], steps={"type": "array", "items": {"$ref": "#/$defs/S"}, "maxItems": 3}),
    "$defs": {"S": obj(["say", "next"], say=STR, next={"type": "array", "items": ENUM})},
}
TREE = {
    "$ref": "#/$defs/n",
    "$defs": {"n": obj([], kids={"type": "array", "items": {"$ref": "#"}})},
}
CLOSED = {**obj(["a"], a=INT, b=STR), "additionalProperties": False}
ENFORCED: dict[str, Any] = {
    "type list": {"type": ["string", "null"]},
    "anything": {},
    "allOf": {"allOf": [obj(["a"], a=INT), obj(["b"], b=STR)]},
    "undeclared required": obj(["b"], a=INT),
    "ref to enum": {"$ref": "#/$defs/E", "$defs": {"E": ENUM}},
    "defs one way": {"$ref": "#/$defs/C", "$defs": {"A": ENUM, "C": {"$ref": "#/$defs/A"}}},
    "defs other way": {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/C"}, "C": ENUM}},
    "ref with sibling": {"$ref": "#/$defs/E", "$defs": {"E": STR}, "maxLength": 2},
    "unicode names": obj(["操作", "应用名"], 操作=STR, 应用名=INT),
    "array of refs": STEPS,
    "recursive": TREE,
    "additional false": CLOSED,
    "additional true": {**CLOSED, "additionalProperties": True},
    "additional absent": obj(["a"], a=INT, b=STR),
    "additional schema": {**CLOSED, "additionalProperties": INT},
    "escaped names": obj(["a/b", 'q"t'], **{"a/b": INT, 'q"t': STR}),
    "const": {"const": 1.0},
    "mixed enum": {"enum": [1, "1", None]},
    "enum and minimum": {"enum": [1, 2, 3], "minimum": 2},
    "range": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 11},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 500},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}(-\\d+)?$"},
    "pattern inside": {"type": "string", "pattern": "x[0-9]", "maxLength": 12},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 3},
    "items": {"type": "array", "items": INT, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [INT, STR], "items": False, "minItems": 2},
    "pattern names": {"type": "object", "patternProperties": {"^a": INT}},
    "at least": {**obj(["a", "b"], a=INT, b=STR), "minProperties": 2},
    "at most": {"type": "object", "additionalProperties": INT, "maxProperties": 2},
    "oneOf": {"oneOf": [obj(["t"], t={"const": "x"}), obj(["t", "v"], t={"const": "y"}, v=INT)]},
    "anyOf": {"anyOf": [INT, {"type": "array", "items": NULL}]},
    "format": {"type": "string", "format": "date"},
}


@pytest.mark.parametrize("name", ENFORCED)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_samples_satisfy_their_schema(vocabulary: str, name: str) -> None:
    words = VOCABULARIES[vocabulary]()
    schema = ENFORCED[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    spec = spec_of(json=schema)
    for seed in range(SAMPLES):
        text = walk(words, ready_matcher(words, spec), np.random.default_rng(seed))
        value = json.loads(text)
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
        if isinstance(value, dict):
            declared = [key for key in schema.get("properties", {}) if key in value]
            assert [key for key in value if key in declared] == declared


@pytest.mark.parametrize("given", [{}, "{}", "true"])
def test_the_empty_schema_is_any_value(given: Any) -> None:
    vocabulary = byte_vocabulary()
    spec = spec_of(json=given)
    seen = set()
    for seed in range(SAMPLES):
        text = walk(vocabulary, ready_matcher(vocabulary, spec), np.random.default_rng(seed))
        seen.add(type(json.loads(text)))
    assert len(seen) >= 4


def test_json_object_is_any_object_and_nothing_else() -> None:
    vocabulary = demo_vocabulary()
    for seed in range(SAMPLES):
        matcher = ready_matcher(vocabulary, spec_of(json_object=True))
        assert isinstance(json.loads(walk(vocabulary, matcher, np.random.default_rng(seed))), dict)


SELF = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
ENDLESS = {"$ref": "#/$defs/n", "$defs": {"n": obj(["n"], n={"$ref": "#/$defs/n"})}}
REFUSED: dict[str, tuple[Any, str]] = {
    "type": ({"type": "nope"}, "nope"),
    "self reference": (SELF, "back to itself"),
    "self reference in anyOf": ({"anyOf": [NULL, {"$ref": "#"}]}, "back to itself"),
    "endless": (ENDLESS, "no finite value"),
    "dangling": ({"$ref": "#/$defs/no"}, "leads nowhere"),
    "remote": ({"$ref": "other.json"}, "only '#'"),
    "pattern": ({"type": "string", "pattern": "("}, "unclosed group"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    "enum": ({"enum": []}, "enum"),
    "false": ("false", "no value"),
    "bounds": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": INT}, "contains"),
    "not": ({"not": INT}, "not"),
    "if": ({"if": STR, "then": {"maxLength": 1}}, "if"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames"),
    "minProperties": ({"type": "object", "minProperties": 2}, "minProperties"),
    "unevaluated": ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    "dynamic": ({"$dynamicRef": "#a"}, "dynamicRef"),
    "draft 3": ({"type": "integer", "divisibleBy": 2}, "divisibleBy"),
    "format": ({"type": "string", "format": "nonsense"}, "nonsense"),
    "overlapping oneOf": ({"oneOf": [INT, {"type": "number"}]}, "oneOf"),
    "options": ({"x-guidance": {"lenient": True}, "type": "array"}, "x-guidance"),
    "control character": ({"enum": ["\x01"]}, "control character"),
    "closed and required": ({**CLOSED, "required": ["z"]}, "unsatisfiable"),
    "minLength": ({"type": "string", "minLength": "x"}, "minLength"),
}


# below the root a reference to "#/..." would mean something else
NESTABLE = [n for n, (s, _) in REFUSED.items() if isinstance(s, dict) and '"#' not in json.dumps(s)]


@pytest.mark.parametrize(
    ("name", "inside"), [(n, False) for n in REFUSED] + [(n, True) for n in NESTABLE]
)
def test_what_cannot_be_enforced_is_refused_with_its_reason(name: str, inside: bool) -> None:
    schema, reason = REFUSED[name]
    if inside:
        schema = obj(["a"], a={"type": "array", "items": schema, "minItems": 1})
    with pytest.raises(ValueError, match=r"^structured_outputs\.json") as caught:
        byte_vocabulary().compiler.compile(spec_of(json=schema)).result(timeout=60)
    assert reason in str(caught.value) or (inside and "unsatisfiable" in str(caught.value))
    assert "\n" not in str(caught.value)


def test_whitespace_cannot_run_away() -> None:
    """B64: even where blanks are taken whenever legal, the value closes and the walk ends."""
    vocabulary = demo_vocabulary()
    blank = [i for i in range(17, vocabulary.size) if not vocabulary.decode([i]).strip(" \n\t\r")]
    lines = [i for i in blank if "\n" in vocabulary.decode([i])]
    assert len(blank) > 10 and len(lines) > 2
    numbers = obj(["a", "b"], a={"type": "array", "items": INT}, b={"enum": ["x", "y"]})
    closed = {**numbers, "additionalProperties": False}
    # a blank is content inside a string, a newline never is
    for spec, wish in [(spec_of(json=closed), blank), (spec_of(json_object=True), lines)]:
        for seed in range(10):
            matcher = ready_matcher(vocabulary, spec)
            text = walk(vocabulary, matcher, np.random.default_rng(seed), wish=wish)
            value = json.loads(text)
            assert "\n" not in text
            if wish is blank:
                assert " " not in text and value["b"] in ("x", "y")


def test_the_end_of_the_value_allows_exactly_the_end_tokens() -> None:
    """B15: a finished grammar wins over min_tokens and ignore_eos, which yield to its mask."""
    vocabulary = byte_vocabulary()
    matcher = ready_matcher(vocabulary, spec_of(json={"type": "boolean"}))
    assert legal_ids(matcher, vocabulary.words) == sorted(
        i for text in ("t", "tr", "true", "f") for i in vocabulary.encode(text)
    )
    assert matcher.accept(vocabulary.encode("true"))
    assert matcher.terminated
    assert legal_ids(matcher, vocabulary.words) == sorted(vocabulary.eos)
    assert matcher.accept([vocabulary.eos[1]])
    assert matcher.terminated
    assert legal_ids(matcher, vocabulary.words) == sorted(vocabulary.eos)
    assert not matcher.accept([vocabulary.eos[0]])
