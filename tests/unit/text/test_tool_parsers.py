"""Parsers of calls and reasoning: what they find, whatever the pieces that the text comes in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.text.tools import NamedCall, Parser, RequiredCalls, make_tool_parser
from jaxengine.text.tools.base import first_of, held
from jaxengine.text.tools.llama3_json import PYTHON_TAG

_PROPERTIES = {
    "a": {"type": "integer"},
    "s": {"type": "string"},
    "b": {"type": ["boolean", "null"]},
    "o": {"type": "object"},
    "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": _PROPERTIES}},
    }
    for name in ("f", "g")
]
Found = list[list[str]]


def read(parser: Parser, pieces: Sequence[str]) -> Found:
    """[["content", text], ["call", name, arguments], ...]"""
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    found: Found = []
    for kind, text in events:
        if kind == "call":
            found.append(["call", text, ""])
        elif kind == "arguments":
            found[-1][2] += text
        elif found and found[-1][0] == kind:
            found[-1][1] += text
        else:
            found.append([kind, text])
    return found


def cut(text: str, seed: int) -> list[str]:
    """Pieces of 1 to 20 characters."""
    dice, pieces = random.Random(seed), []
    while text:
        size = dice.choice((1, 1, 2, 3, 7, 20))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def check(make: Callable[[], Parser], text: str, expected: Found) -> None:
    """Whole, character by character, and cut at random."""
    assert read(make(), [text]) == expected
    assert read(make(), list(text)) == expected
    for seed in range(12):
        assert read(make(), cut(text, seed)) == expected


CASES: list[tuple[str, str, Found]] = [
    # hermes
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "}é\\"<tool_call>"}}\n</tool_call>',
        [["call", "f", '{"a": 1, "s": "}é\\"<tool_call>"}']],
    ),
    (
        "hermes",
        'hi <tool_call>{"arguments":{},"name":"f"}</tool_call>\n<tool_call>{"name":"g"}</tool_call>'
        " bye ",
        [["content", "hi"], ["call", "f", "{}"], ["call", "g", "{}"], ["content", "bye "]],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"b": true, "n": null, "l": [{"x": 1}]}}',
        [["call", "f", '{"b": true, "n": null, "l": [{"x": 1}]}']],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', [["call", "f", "{}"]]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}', [["call", "f", '{"a":1}']]),
    (
        "hermes",  # a brace too many
        '<tool_call>{"name":"f","arguments":{"a":1}}}\n</tool_call>after',
        [["call", "f", '{"a":1}'], ["content", "after"]],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":[1', [["call", "f", '{"a":[1]}']]),
    ("hermes", "<tool_call>nope</tool_call> x", [["content", "<tool_call>nope</tool_call> x"]]),
    ("hermes", '<tool_call> {"x":1} <tool_', [["content", '<tool_call> {"x":1} <tool_']]),
    ("hermes", "a <b> c\n", [["content", "a <b> c\n"]]),
    # qwen3
    (
        "qwen3",
        "x\n<tool_call>\n<function=f>\n<parameter=a>\n42\n</parameter>\n<parameter=s>\n1\n2\n"
        "</parameter>\n</function>\n</tool_call>\n",
        [["content", "x"], ["call", "f", '{"a": 42, "s": "1\\n2"}']],
    ),
    ("qwen3", "<function=g>\n</function>\nok", [["call", "g", "{}"], ["content", "ok"]]),
    ("qwen3", '<tool_call>{"name":"f","arguments":{}}</tool_call>', [["call", "f", "{}"]]),
    (
        "qwen3_coder",
        '<function=f><parameter=b>True</parameter><parameter=o>{"k":[1]}</parameter>'
        "<parameter=x>None</parameter></function></tool_call><tool_call><function=g></function>",
        [["call", "f", '{"b": true, "o": {"k": [1]}, "x": null}'], ["call", "g", "{}"]],
    ),
    ("qwen3", "<tool_call><b>", [["content", "<tool_call><b>"]]),
    # llama3_json
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name":"g","parameters":{}}',
        [["call", "f", '{"a": 1}'], ["call", "g", "{}"]],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        [["call", "f", '{"a": 1}']],
    ),
    ("llama3_json", '{"name":"Bob","age":3}', [["content", '{"name":"Bob","age":3}']]),
    ("llama3_json", 'see {"name":"f"}', [["content", 'see {"name":"f"}']]),
    (
        "llama3_json",
        ' {"type":"function","name":"f","parameters":{"s":"x;y"}} and more',
        [["call", "f", '{"s":"x;y"}'], ["content", "and more"]],
    ),
    # mistral
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{}}]',
        [["call", "f", '{"a": 1}'], ["call", "g", "{}"]],
    ),
    (
        "mistral",
        'so: [TOOL_CALLS]f{"a":"}"}[TOOL_CALLS]g[ARGS]{}',
        [["content", "so:"], ["call", "f", '{"a":"}"}'], ["call", "g", "{}"]],
    ),
    ("mistral", "hm [TOOL_CALLS] no", [["content", "hm [TOOL_CALLS] no"]]),
    # pythonic
    (
        "pythonic",
        '[f(a=1, s="x, y) \\" é", b=None), g()]',
        [["call", "f", '{"a": 1, "s": "x, y) \\" é", "b": null}'], ["call", "g", "{}"]],
    ),
    (
        "pythonic",
        '[f(o={"k": [1, (2, -3.5)], "t": true})] ok',
        [["call", "f", '{"o": {"k": [1, [2, -3.5]], "t": true}}'], ["content", "ok"]],
    ),
    ("pythonic", "[1, 2]", [["content", "[1, 2]"]]),
    ("pythonic", "[h(a=1)]", [["content", "[h(a=1)]"]]),
    ("pythonic", "[f(__import__('os'))] x", [["content", "[f(__import__('os'))] x"]]),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_b23_calls_in_any_pieces(name: str, text: str, expected: Found) -> None:
    check(lambda: make_tool_parser(name, TOOLS), text, expected)


def test_enforced_calls() -> None:
    text = '[{"name":"f","parameters":{"a":1}},{"name":"g","parameters":{}}]'
    check(RequiredCalls, text, [["call", "f", '{"a":1}'], ["call", "g", "{}"]])
    check(lambda: NamedCall("f"), '{"a":1}', [["call", "f", '{"a":1}']])


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
_names = st.text(max_size=5).map(lambda name: f"_{name}")  # none that the schema types
_calls = st.lists(
    st.tuples(st.sampled_from("fg"), st.dictionaries(_names, _json, max_size=3)),
    min_size=1,
    max_size=3,
)
WRITERS: dict[str, Callable[[str, str], str]] = {
    "hermes": lambda n, a: f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>\n',
    "llama3_json": lambda n, a: f'{{"name": "{n}", "parameters": {a}}}; ',
    "mistral": lambda n, a: f"[TOOL_CALLS]{n}{a}",
}


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=25, deadline=None)
@given(calls=_calls, seed=st.integers(0, 1000), escape=st.booleans())
def test_written_calls_come_back(
    name: str, calls: list[tuple[str, Any]], seed: int, escape: bool
) -> None:
    texts = [(f, json.dumps(a, ensure_ascii=escape)) for f, a in calls]
    text = "".join(WRITERS[name](f, a) for f, a in texts)
    found = read(make_tool_parser(name, TOOLS), cut(text, seed))
    assert found == [["call", f, a] for f, a in texts]


_noise = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</function>", '{"name"']
        + [': "f"', ', "arguments": {', "}", "[f(", "a=1", ")", "]", "[TOOL_CALLS]", "f", "{", '"']
        + [" ", "\n", "x", "\\", ",", "<|python_tag|>", "</parameter>", "[ARGS]", ";"]
    ),
    max_size=14,
)


@pytest.mark.parametrize("name", ["hermes", "qwen3", "llama3_json", "mistral", "pythonic"])
@settings(max_examples=50, deadline=None)
@given(parts=_noise, seed=st.integers(0, 1000))
def test_noise_reads_the_same_in_pieces(name: str, parts: list[str], seed: int) -> None:
    text = "".join(parts)
    whole = read(make_tool_parser(name, TOOLS), [text])
    assert read(make_tool_parser(name, TOOLS), cut(text, seed)) == whole
    if not any(kind == "call" for kind, *_ in whole):  # nothing is lost
        kept = "".join(piece for _, piece in whole)
        if name in ("llama3_json", "pythonic"):  # the tag is left out, unless it is quoted
            kept, text = kept.replace(PYTHON_TAG, ""), text.replace(PYTHON_TAG, "")
        assert kept == text


def test_markers() -> None:
    assert held("ab<to", ("<tool>", "</tool>")) == 3
    assert held("ab<tool>", ("<tool>",)) == 0
    assert held("x<", ("<a>", "<<b>")) == 1
    assert first_of("a<b><c>", ("<c>", "<b>")) == (1, "<b>")
    assert first_of("abc", ("x",)) == (-1, "")
