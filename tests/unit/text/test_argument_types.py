"""The types of arguments, however a schema names them, and values that are made to fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_broken_calls import STRING, TOOLS, call, parser, xml
from test_call_properties import calls_in, tool, whole_and_cut
from test_tool_parsers import read

from jaxengine.text.tools import NamedCall, Parser, RequiredCalls, make_tool_parser


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('"i": "5"', 5),
        ('"i": 5.0', 5),
        ('"i": 1e3', 1000),
        ('"i": +5', 5),
        ('"i": 007', 7),
        ('"i": 0x10', 16),
        ('"i": 1_000', 1000),
        ('"i": "5.0"', 5),
        ('"i": 5.5', 5.5),
        ('"i": "many"', "many"),
        ('"i": 1e999999999', float("inf")),
        ('"i": 2026-01-15', "2026-01-15"),
        ('"x": .5', 0.5),
        ('"x": "5"', 5),
        ('"x": NaN', None),
        ('"x": -Infinity', None),
        ('"b": "true"', True),
        ('"b": "False"', False),
        ('"b": True', True),
        ('"b": 1', True),
        ('"s": 5', "5"),
        ('"s": 1.50', "1.50"),
        ('"s": true', "true"),
        ('"s": {"k": [1]}', '{"k": [1]}'),
        ('"q": 5', "5"),
        ('"q": None', None),
        ('"o": "{\\"n\\": \\"1\\", \\"s\\": 2}"', {"n": 1, "s": "2"}),
        ('"o": {"n": "1", "s": 2, "z": "3"}', {"n": 1, "s": "2", "z": "3"}),
        ('"l": "[1, \\"2\\"]"', [1, 2]),
        ('"l": [1, "2", 3.0]', [1, 2, 3]),
        (f'"x": {"1" * 5000}', "1" * 5000),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "named", "required"])
def test_values_fit_the_schema(name: str, written: str, value: Any) -> None:
    key = written.partition('"')[2].partition('"')[0]
    makes: dict[str, tuple[Callable[[], Parser], str]] = {
        "hermes": (parser("hermes"), '<tool_call>{"name": "t", "arguments": {%s}}</tool_call>'),
        "llama3_json": (parser("llama3_json"), '{"name": "t", "parameters": {%s}}'),
        "mistral": (parser("mistral"), "[TOOL_CALLS]t[ARGS]{%s}"),
        "named": (lambda: NamedCall("t", TOOLS), "{%s}"),
        "required": (lambda: RequiredCalls(TOOLS), '[{"name": "t", "parameters": {%s}}]'),
    }
    make, form = makes[name]
    [(_, arguments)] = calls_in(whole_and_cut(make, form.replace("%s", written)))
    assert arguments == {key: value} and type(arguments[key]) is type(value)


DEFS = {
    "Code": STRING,
    "Size": {"type": "string", "enum": ["1", "2"]},
    "Filter": {"type": "object", "properties": {"n": {"$ref": "#/$defs/Count"}}},
    "Count": {"$ref": "#/definitions/Whole"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "integer"}]},
    "a/b~c": {"type": "boolean"},
}
WHOLE_NUMBER = {"Whole": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/Code"}, "123", "123"),
        ({"$ref": "#/$defs/Code"}, "true", "true"),
        ({"$ref": "#/$defs/Size"}, "2", "2"),
        ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "123", "123"),
        ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"$ref": "#/$defs/Filter"}, {"type": "null"}]}, '{"n": "1"}', {"n": 1}),
        ({"$ref": "#/$defs/Filter"}, "{'n': 1,}", {"n": 1}),
        ({"$ref": "#/$defs/Count"}, "5.0", 5),
        ({"$ref": "#/definitions/Whole"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/Count"}], "description": "d"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/Code"}, {"minLength": 1}]}, "5", "5"),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"$ref": "#/$defs/Tree"}, "5", 5),
        ({"$ref": "#/$defs/a~1b~0c"}, "true", True),
        ({"$ref": "#/$defs/nothing"}, "5", "5"),
        ({"$ref": "#/properties/other"}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": ["1", 2, None]}, "2", 2),
        ({"enum": ["1", 2, None]}, "1", "1"),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"type": ["string", "null"]}, "123", "123"),
        ({"type": ["string", "null"]}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["object", "string"]}, '{"a": 1}', {"a": 1}),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"properties": {"n": {"type": "integer"}}}, '{"n": 1}', {"n": 1}),
        ({"items": {"$ref": "#/$defs/Code"}}, "[1, 2]", ["1", "2"]),
        ({"type": "array", "items": {"$ref": "#/$defs/Count"}}, '["1", 2.0]', [1, 2]),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "integer"}, "2026-01-15", "2026-01-15"),
        ({"type": "boolean"}, "True", True),
        ({}, "5", "5"),
        (True, "5", "5"),
    ],
)
@pytest.mark.parametrize("form", ["xml", "json", "pythonic"])
def test_f48_types_however_a_schema_names_them(
    form: str, schema: Any, text: str, value: Any
) -> None:
    made = tool("g", v=schema, other={"type": "integer"})
    made["function"]["parameters"] |= {"$defs": DEFS, "definitions": WHOLE_NUMBER}
    if form == "xml":
        written, name = xml(("v", text), name="g"), "qwen3_coder"
    elif schema in ({}, True) or (isinstance(schema, dict) and "nothing" in str(schema)):
        return  # text without a type is what it looks like in the other formats
    elif "Loop" in str(schema) or "2026" in text or (text == "2" and "'1', 2" in str(schema)):
        return
    elif form == "json":
        written, name = call(f'{{"v": {text}}}', "g"), "hermes"
    else:
        written, name = f"[g(v={text})]", "pythonic"
    found = whole_and_cut(lambda: make_tool_parser(name, [made]), written)
    assert calls_in(found) == [("g", {"v": value})]
    assert type(calls_in(found)[0][1]["v"]) is type(value)


def test_schemas_that_refer_to_themselves_end() -> None:
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    wide = {f"w{i}": {"anyOf": [{"$ref": f"#/$defs/w{i + 1}"}] * 8} for i in range(60)}
    made = tool("g", v={"$ref": "#/$defs/d0"}, w={"$ref": "#/$defs/w0"})
    made["function"]["parameters"]["$defs"] = {**chain, **wide, "w60": {"type": "integer"}}
    text = xml(("v", "5"), ("w", "5"), name="g")
    found = read(make_tool_parser("qwen3", [made]), [text])
    assert calls_in(found) == [("g", {"v": "5", "w": 5})]
