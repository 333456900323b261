"""Calls as models write them, made at random and then broken: what every parser must keep to.

Whatever the pieces, the same is found; arguments are always an object's JSON; no text is lost; and
what is well written is read exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_parsers import Found, read

from jaxengine.text.reasoning import AnswerGate, Harmony, Think
from jaxengine.text.tools import NamedCall, Parser, Plain, RequiredCalls, make_tool_parser

STRING = {"type": "string"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if properties:
        function["parameters"] = {"type": "object", "properties": properties}
    return {"type": "function", "function": function}


TOOLS = [
    tool("any"),
    tool("write", path=STRING, content=STRING),
    tool(
        "typed",
        i={"type": "integer"},
        x={"type": "number"},
        b={"type": "boolean"},
        o={"type": "object"},
        l={"type": "array", "items": {"type": "integer"}},
        s={"anyOf": [STRING, {"type": "null"}]},
    ),
]
Call = tuple[str, dict[str, Any]]

# what strings are made of: the marks of all formats, quotes, brackets
SHARDS = [
    *("<tool_call>", "</tool_call>", "<function=any>", "</function>", "<think>", "</think>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "</s>", "```", "{", "}", "[", "]", "(", ")"),
    *('"', "'", "\\", "\n", "\t", " ", ",", ":", ", ", '": ', "a", "b=1", "é", "☃", "😀", "\u2028"),
    *(
        "//",
        "#",
        "/*",
        "=",
        "null",
        "1",
        '"}',
        '"]',
        "{'a'",
        "<parameter=path>",
        "\x00",
        "</parameter>",
    ),
]
strings = st.lists(st.sampled_from(SHARDS), max_size=6).map("".join) | st.text(max_size=6)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
plain_calls = st.tuples(st.just("any"), st.dictionaries(strings, values, max_size=3))
write_calls = st.tuples(
    st.just("write"), st.fixed_dictionaries({"path": strings, "content": strings})
)
typed_calls = st.tuples(
    st.just("typed"),
    st.fixed_dictionaries(
        {},
        optional={
            "i": st.integers(),
            "x": st.floats(allow_nan=False, allow_infinity=False),
            "b": st.booleans(),
            "o": st.dictionaries(strings, values, max_size=2),
            "l": st.lists(st.integers(), max_size=3),
            "s": st.none() | strings,
        },
    ),
)
json_calls = st.lists(plain_calls | write_calls | typed_calls, min_size=1, max_size=3)

# what a line of a value is made of where values are plain text: tags that are talked about
words = st.sampled_from(
    [
        "x",
        "the tag </parameter> here",
        "a <parameter=path> b",
        "a </tool_call> b",
        "é\\n",
        '"q"',
        "  in <function=any> out",
        "{",
        "<b>y</b>",
        "z </function> z",
        "<tool_call> w",
        "",
        "</think> q",
    ]
)
lines = st.lists(words, max_size=4).map("\n".join)
NESTED = (
    "Like this:\n<tool_call>\n<function=write>\n<parameter=path>\np\n</parameter>\n</function>\n"
    "</tool_call>\nEnd."
)
xml_calls = st.lists(
    st.tuples(
        st.just("write"),
        st.fixed_dictionaries(
            {"path": lines}, optional={"content": lines | lines.map(lambda x: NESTED + x)}
        ),
    )
    | st.tuples(st.just("any"), st.just({})),
    min_size=1,
    max_size=3,
)
idents = st.sampled_from(["a", "b_1", "éa"])
python_calls = st.lists(
    st.tuples(st.just("any"), st.dictionaries(idents, values, max_size=3)) | write_calls,
    min_size=1,
    max_size=3,
)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumped(args)}}}\n</tool_call>'
        for name, args in calls
    )


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {dumped(a)}}}' for n, a in calls)


def mistral_list(calls: Sequence[Call]) -> str:
    listed = (f'{{"name": "{n}", "arguments": {dumped(a)}}}' for n, a in calls)
    return f"[TOOL_CALLS][{', '.join(listed)}]"


def mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumped(a)}" for n, a in calls)


def pythonic(calls: Sequence[Call]) -> str:
    shown = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"[{', '.join(shown)}]"


def xml(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    )


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumped(a)}<|call|>"
        for n, a in calls
    )


def required(calls: Sequence[Call]) -> str:
    return f"[{','.join(f'{{"name":"{n}","parameters":{dumped(a)}}}' for n, a in calls)}]"


Make = Callable[[], Parser]
FORMATS: dict[str, tuple[Make, Callable[[Sequence[Call]], str], Any]] = {
    "hermes": (lambda: make_tool_parser("hermes", TOOLS), hermes, json_calls),
    "qwen3": (lambda: make_tool_parser("qwen3", TOOLS), hermes, json_calls),
    "qwen3_coder": (lambda: make_tool_parser("qwen3_coder", TOOLS), xml, xml_calls),
    "llama3_json": (lambda: make_tool_parser("llama3_json", TOOLS), llama, json_calls),
    "mistral": (lambda: make_tool_parser("mistral", TOOLS), mistral_list, json_calls),
    "mistral named": (lambda: make_tool_parser("mistral", TOOLS), mistral_named, json_calls),
    "pythonic": (lambda: make_tool_parser("pythonic", TOOLS), pythonic, python_calls),
    "harmony": (lambda: Harmony(tools=TOOLS), harmony, json_calls),
    "required": (lambda: RequiredCalls(TOOLS), required, json_calls),
    "named": (
        lambda: NamedCall("any"),
        lambda c: dumped(c[0][1]),
        st.lists(plain_calls, min_size=1, max_size=1),
    ),
}
TEXT = [name for name in FORMATS if name not in ("harmony", "required", "named")]
UNIFORM = settings(max_examples=40, deadline=None, derandomize=True)
THOROUGH = settings(max_examples=1000, deadline=None)


def whole_and_cut(make: Make, text: str) -> Found:
    """What is found, the same in pieces of 1, 3 and 50 characters."""
    whole = read(make(), [text])
    for size in (1, 3, 50):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(make(), pieces) == whole, (size, text)
    for entry in whole:
        if entry[0] == "call":
            assert isinstance(json.loads(entry[2]), dict), (entry, text)
    return whole


def calls_in(found: Found) -> list[Call]:
    return [(entry[1], json.loads(entry[2])) for entry in found if entry[0] == "call"]


def text_in(found: Found, *kinds: str) -> str:
    return "".join(entry[-1] for entry in found if entry[0] in kinds)


def check_well_written(name: str, data: st.DataObject) -> None:
    make, write, strategy = FORMATS[name]
    calls: list[Call] = data.draw(strategy)
    before, after = "", ""
    if name in TEXT:
        before = data.draw(st.sampled_from(["", "Sure:\n", "So [1, 2] {x}: ", '{"name": "Bob"} ']))
        after = data.draw(st.sampled_from(["", "\nDone.", ' {"z": [1]}']))
    found = whole_and_cut(make, before + write(calls) + after)
    assert calls_in(found) == calls
    if write in (hermes, llama, mistral_list, mistral_named, harmony, required):
        assert [e[2] for e in found if e[0] == "call"] == [dumped(a) for _, a in calls]
    content = text_in(found, "content", "reasoning")
    assert content.split() == f"{before.strip()}{after.strip()}".split() or (
        content == before.strip() + after.strip()
    )


@pytest.mark.parametrize("name", FORMATS)
@UNIFORM
@given(data=st.data())
def test_well_written_calls(name: str, data: st.DataObject) -> None:
    check_well_written(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@THOROUGH
@given(data=st.data())
def test_well_written_calls_thoroughly(name: str, data: st.DataObject) -> None:
    check_well_written(name, data)


# what a breakage takes away, misspells, doubles or puts in
DELIMITERS = [
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|message|>", "<|call|>", "<|channel|>", "<|constrain|>"),
    *('"name"', '"arguments"', '"', "'", "{", "}", "[", "]", "(", ")", ",", ":", "=", "\n", ">"),
    *("functions.", "</think>", "<think>"),
]
INSERTS = [
    *DELIMITERS,
    ",}",
    "None",
    "True",
    "\\",
    "\\d",
    "// x\n",
    "```json\n",
    "PROSE",
    "</think>",
]


def broken(text: str, data: st.DataObject) -> str:
    """The text with one to three things wrong."""
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(["drop", "misspell", "double", "cut", "insert", "swap"]))
        mark = data.draw(st.sampled_from(DELIMITERS))
        places = [at for at in range(len(text)) if text.startswith(mark, at)]
        at = data.draw(st.sampled_from(places)) if places else data.draw(st.integers(0, len(text)))
        behind = at + (len(mark) if places else 0)
        if way == "drop":
            text = text[:at] + text[behind:]
        elif way == "misspell":
            text = text[: behind - 1] + "s" + text[max(behind - 1, 0) :]
        elif way == "double":
            text = text[:behind] + text[at:]
        elif way == "cut":
            text = text[:behind]
        elif way == "insert":
            text = text[:at] + data.draw(st.sampled_from(INSERTS)) + text[at:]
        else:
            text = text.replace('"', "'")
    return text


def check_broken(name: str, data: st.DataObject) -> None:
    make, write, strategy = FORMATS[name]
    text = broken(write(data.draw(strategy)), data)
    before = data.draw(st.sampled_from(["", "Zebra. "]))
    found = whole_and_cut(make, before + text if name in TEXT else text)
    if name in TEXT and before:
        assert text_in(found, "content").startswith("Zebra.")
    if name in TEXT and not calls_in(found):
        assert letters(text_in(found, "content")) == letters(before + text)


def letters(text: str) -> list[str]:
    """Without the marker that is never content."""
    return [char for char in text.replace("<|python_tag|>", "") if char.isalpha()]


@pytest.mark.parametrize("name", FORMATS)
@UNIFORM
@given(data=st.data())
def test_broken_calls(name: str, data: st.DataObject) -> None:
    check_broken(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@THOROUGH
@given(data=st.data())
def test_broken_calls_thoroughly(name: str, data: st.DataObject) -> None:
    check_broken(name, data)


def check_thoughts(name: str, data: st.DataObject) -> None:
    """Thoughts before calls, closed or not, broken or not; and the gate agrees."""
    make, write, strategy = FORMATS[name]
    start = data.draw(st.sampled_from(["inside", "maybe"]))
    thought = data.draw(
        st.sampled_from(
            ["hm", "the `</think>` tag", "use <tool_call> or [TOOL_CALLS] x", "[1, 2] {"]
        )
    )
    closer = data.draw(st.sampled_from(["\n</think>\n\n", "\n</think>", "\n"]))
    wrong = data.draw(st.booleans())
    calls: list[Call] = data.draw(strategy)
    text = broken(write(calls), data) if wrong else write(calls)
    opener = "<think>\n" if start == "maybe" else ""
    whole = f"{opener}{thought}{closer}{text}"
    found = whole_and_cut(lambda: Think(start, make()), whole)
    assert found[0][0] == "reasoning" and str(found[0][1]).startswith(thought)
    if not wrong:
        assert calls_in(found) == calls
        assert found[0][1] == thought and text_in(found, "content") == ""
    parser, size = name.partition(" ")[0], data.draw(st.sampled_from([1, 3, 50]))
    gate = AnswerGate("qwen3", start, parser, TOOLS)
    cut = [whole[at : at + size] for at in range(0, len(whole), size)]
    pieces = [p for piece in cut for p in gate.push(piece)] + gate.flush()
    assert "".join(piece for piece, _ in pieces) == whole
    answer = "".join(piece for piece, of_answer in pieces if of_answer)
    assert wrong or answer == text
    plain = AnswerGate("qwen3", start)
    answer = "".join(piece for piece, of_answer in plain.push(whole) + plain.flush() if of_answer)
    assert answer == text_in(read(Think(start, Plain()), cut), "content")


@pytest.mark.parametrize("name", TEXT)
@UNIFORM
@given(data=st.data())
def test_calls_and_thoughts(name: str, data: st.DataObject) -> None:
    check_thoughts(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT)
@THOROUGH
@given(data=st.data())
def test_calls_and_thoughts_thoroughly(name: str, data: st.DataObject) -> None:
    check_thoughts(name, data)
