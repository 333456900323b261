"""Calls as models break them in the field: each comes out as it was meant, or stays text; what
reaches the client parses and fits the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_call_properties import calls_in, tool, whole_and_cut
from test_tool_parsers import Found

from jaxengine.text.tools import NamedCall, Parser, RequiredCalls, make_tool_parser

STRING = {"type": "string"}
TOOLS = [
    tool("f", a=STRING),
    tool("w", path=STRING, content=STRING),
    tool(
        "t",
        i={"type": "integer"},
        x={"type": "number"},
        b={"type": "boolean"},
        o={"type": "object", "properties": {"n": {"type": "integer"}, "s": STRING}},
        l={"type": "array", "items": {"type": "integer"}},
        s=STRING,
        q={"anyOf": [STRING, {"type": "null"}]},
    ),
    tool("bare"),
]
X = [("f", {"a": "x"})]
Expected = tuple[str, list[tuple[str, Any]]]  # content and calls


def parser(name: str) -> Callable[[], Parser]:
    return lambda: make_tool_parser(name, TOOLS)


def content(found: Found) -> str:
    return "|".join(entry[1] for entry in found if entry[0] == "content")


def reads(make: Callable[[], Parser], text: str, expected: Expected) -> None:
    found = whole_and_cut(make, text)
    assert (content(found), calls_in(found)) == expected
    assert not any(entry[0] == "reasoning" for entry in found)


def xml(*parameters: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


WHOLE = xml(("a", "x"))
F = "<tool_call>\n<function=f>\n<parameter=a>\nx\n"
PATH = "<tool_call>\n<function=w>\n<parameter=path>\np\n</parameter>\n<parameter=content>\n"
CLOSED = "\n</parameter>\n</function>\n</tool_call>"
NESTED = f"See:\n{WHOLE}\nEnd."
Y = WHOLE.replace("\nx\n", "\ny\n")
TWO = [*X, ("f", {"a": "y"})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # a closing tag is missing
        (f"{F}</function>\n</tool_call>", ("", X)),
        (f"{F}</parameter>\n</tool_call> bye", ("bye", X)),
        (f"{F}</parameter>\n</function>", ("", X)),
        (f"{F}</parameter>\n</function>\n\nbye", ("bye", X)),
        (f"{F}</parameter>\n", ("", X)),
        (f"{F}</parameter>\n\nSo much for that.", ("So much for that.", X)),
        (f"{F}</tool_call>", ("", X)),
        (F, ("", X)),
        (F.rstrip(), ("", X)),
        (f"{F}</para", ("", X)),
        (
            "<tool_call>\n<function=w>\n<parameter=path>\na.txt\n<parameter=content>\nhello\n"
            "</parameter>\n</function>\n</tool_call>",
            ("", [("w", {"path": "a.txt", "content": "hello"})]),
        ),
        (f"{F}</function>\n</tool_call>\n{Y}", ("", TWO)),
        (f"{F}</parameter>\n{Y}", ("", TWO)),
        (f"{F}{Y}", ("", TWO)),
        # or misspelt, or of another kind
        *(
            (f"{F}{closer}\n</function>\n</tool_call>", ("", X))
            for closer in ("</parameter1>", "</param>", "</parameters>", "</parameter=a>", "</a>")
        ),
        (f"{F}</parameter >\n</function >\n</tool_call>", ("", X)),
        (f"{F}</parameter>\n</func>\n</tool_call>", ("", X)),
        # or there twice
        (f"{F}</parameter>\n</parameter>\n</function>\n</tool_call>\n</tool_call> z", ("z", X)),
        (f"<tool_call>\n{WHOLE}", ("", X)),
        # opening tags in other spellings
        (WHOLE.replace("=f", '="f"').replace("=a", "='a'"), ("", X)),
        (WHOLE.replace("=f", ' name="f"').replace("=a", ' name="a"'), ("", X)),
        (WHOLE.replace("=f", " = f ").replace("<parameter=a", "<param= a"), ("", X)),
        (WHOLE.replace("=f>", "=f").replace("=a>", "=a"), ("", X)),
        (WHOLE.replace("=f", "=functions.f"), ("", X)),
        (WHOLE.replace("\n", ""), ("", X)),
        (WHOLE.replace("\n", "\r\n"), ("", X)),
        ('<tool_call><function=f>{"a": "x"}</function></tool_call>', ("", X)),
        ("<tool_call>\n<function=bare>\n</tool_call>", ("", [("bare", {})])),
        ("<tool_call><function=bare>", ("", [("bare", {})])),
        # several functions between one pair of tags
        (WHOLE.replace("</tool_call>", "") + Y.replace("<tool_call>\n", ""), ("", TWO)),
        # tags that are only talked about
        (
            "Write <function=name> and <parameter=a>.",
            ("Write <function=name> and <parameter=a>.", []),
        ),
        ("The tag <tool_call> begins it", ("The tag <tool_call> begins it", [])),
    ],
)
def test_f03_xml(text: str, expected: Expected) -> None:
    reads(parser("qwen3_coder"), text, expected)


@pytest.mark.parametrize(
    "value",
    [
        "A tool call block ends with </tool_call> on its own.",
        "A parameter block ends with </parameter> here.",
        'def f():\n    return "</parameter>"\n',
        "<a href='x'>y</a>",
        "<content>\nz\n</content>",
        "first\n</function>\nlast",
        "first\n</tool_call>\nlast",
        "use <parameter=path> and\n<parameter=path>\nso",
        "<parameter=other>\n1\n</parameter>\nend",
        NESTED,
        f"{WHOLE}\n{WHOLE}\n.",
        WHOLE.replace("=f", "=unknown") + "\nEnd.",
        "<tool_call>\nno\n</tool_call>\n.",
        "a\n\n  b  \n",
        "",
        '{"a": 1}',
        "<think>\n</think>",
        "<",
        "</",
    ],
)
def test_f03_a_value_with_its_own_delimiters(value: str) -> None:
    expected = ("bye", [("w", {"path": "p", "content": value})])
    reads(parser("qwen3_coder"), f"{PATH}{value}{CLOSED}\nbye", expected)


def call(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = '{"name": "f", "arguments": {"a": "x"}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(
            (call(arguments), ("", X))
            for arguments in (
                "{'a': 'x'}",
                '{"a": "x",}',
                '{a: "x"}',
                '{"a": x}',
                '{"a" "x"}',
                '{"a": "x"',
                '{"a": "x"}}}',
                '{"a": "x"]}',
                '"{\\"a\\": \\"x\\"}"',
                '"\\"{\\\\\\"a\\\\\\": \\\\\\"x\\\\\\"}\\""',
                '[{"a": "x"}]',
                '{{"a": "x"}}',
                '{"a": "x"}{"a": "x"}',
                '{"a": "x" /* c */ } // d',
                '{"a": "x}',
                '"x"',
            )
        ),
        (call("null"), ("", [("f", {})])),
        (call('""'), ("", [("f", {})])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", {})])),
        (call('{"a": "l1\nl2\t\\d C:\\\\ \\\'"}'), ("", [("f", {"a": "l1\nl2\t\\d C:\\ '"})])),
        (call('{"a": "say "hi" to, "you""}'), ("", [("f", {"a": 'say "hi" to, "you"'})])),
        (
            call('{"a": "env.get("KEY", "default")"}'),
            ("", [("f", {"a": 'env.get("KEY", "default")'})]),
        ),
        (call('{"a": "{"k": "v"}"}'), ("", [("f", {"a": '{"k": "v"}'})])),
        (call("{'a': 'it's'}"), ("", [("f", {"a": "it's"})])),
        (call('{"a": """q "x"\n"""}'), ("", [("f", {"a": 'q "x"\n'})])),
        (call('{"a": "\\ud83d z"}'), ("", [("f", {"a": "\ufffd z"})])),
        (
            call('{"a": "the </tool_call> tag"}') + " z",
            ("z", [("f", {"a": "the </tool_call> tag"})]),
        ),
        (call('{"a": "a <tool_call> b"}'), ("", [("f", {"a": "a <tool_call> b"})])),
        # the object around the arguments
        (f"<tool_call>{ONE.replace('"', "'")}</tool_call>", ("", X)),
        (f"<tool_call>{ONE[:-1]}</tool_call>", ("", X)),
        (f"<tool_call>{ONE[:-2]}</tool_call>", ("", X)),
        (f"<tool_call>{ONE[:-3]}</tool_call>", ("", X)),
        (f"<tool_call>{ONE[:-1]},}}</tool_call>", ("", X)),
        (f"<tool_call>\n```json\n{ONE}\n```\n</tool_call>", ("", X)),
        (f"```\n<tool_call>{ONE}</tool_call>\n```\nz", ("z", X)),
        (f"<tool_call>[{ONE}, {ONE}]</tool_call>", ("", [*X, *X])),
        ('<tool_call>{"name": "f", "a": "x"}</tool_call>', ("", X)),
        (f'<tool_call>{{"type": "function", "function": {ONE}}}</tool_call>', ("", X)),
        ('<tool_call>{"name": "functions.f", "arguments": {"a": "x"}}</tool_call>', ("", X)),
        ('<tool_call>{"arguments": {"a": "x"}, "name": "f"}', ("", X)),
        # tags
        (f"<tool_call>{ONE}", ("", X)),
        (f"<tool_call>{ONE}</tool_call></tool_call> z", ("z", X)),
        (f"<tool_call>\n<tool_call>\n{ONE}\n</tool_call>", ("", X)),
        (f"{ONE}\n</tool_call>", ("", X)),
        (f"<tool_call>{ONE}<tool_call>{ONE}", ("", [*X, *X])),
        (f"a {ONE} z", (f"a {ONE} z", [])),
        (f"<tool_call>{ONE[:-3]}}}}}</tool_call>\n<tool_call>{ONE}</tool_call>", ("", [*X, *X])),
        # cut off
        ('<tool_call>{"name": "f", "arguments": {"a": "x', ("", X)),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\\', ("", X)),
        ('<tool_call>{"name": "f", "arguments": {"a": "x", "b', ("", X)),
        ('<tool_call>{"name": "f", "arguments": {"a": "x", "b": ', ("", X)),
        ('<tool_call>{"name": "f", "argu', ("", [("f", {})])),
        ('<tool_call>{"name": "f', ('<tool_call>{"name": "f', [])),
    ],
)
def test_json_calls(text: str, expected: Expected) -> None:
    reads(parser("hermes"), text, expected)
    reads(parser("qwen3"), text, expected)


L = '{"name": "f", "parameters": {"a": "x"}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Sure. {L}", ("Sure.", X)),
        (f"Sure.<|python_tag|>{L}", ("Sure.", X)),
        (f"Sure. {L}\n\nDone.", ("Sure.|Done.", X)),
        (f"A {L} b {L} c", ("A|b|c", [*X, *X])),
        (f"Sure:\n```json\n{L}\n```\nDone.", ("Sure:|Done.", X)),
        (f"[{L}, {L}]", ("", [*X, *X])),
        (f"<|python_tag|>{L}; {L}<|eom_id|>", ("", [*X, *X])),
        ('Sure. <function=f>{"a": "x"}</function>', ("Sure.", X)),
        (f"Sure. {L[:-1]}", ("Sure.", X)),
        (f"Sure. {L[:-1]} and more", ("Sure.|and more", X)),
        (f"{L[:-1].replace('"', "'")},}}", ("", X)),
        ("<|python_tag|>print(1)", ("print(1)", [])),
        ("The `<|python_tag|>` marker.", ("The `<|python_tag|>` marker.", [])),
        *(
            (text, (text, []))
            for text in (
                'I know {"name": "Bob"} and [1, 2].',
                'So: {"name": "Bob", "friend": {"name": "f", "parameters": {}}}.',
                '[{"name": "Bob"}, {"name": "f", "parameters": {}}]',
                '```json\n{"name": "Bob"}\n```',
                'see {"name": "f"}',
                "int main() { return f(x); }",
            )
        ),
        ('{"name": "Bob"}\n\n' + L, ('{"name": "Bob"}', X)),
    ],
)
def test_f08_llama_json(text: str, expected: Expected) -> None:
    reads(parser("llama3_json"), text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Sure:\n[f(a="x")]', ("Sure:", X)),
        ('Sure:\n[f(a="x")]\nDone.', ("Sure:|Done.", X)),
        ('Sure:\n```python\n[f(a="x")]\n```', ("Sure:", X)),
        ('See [1, 2] and [f] and [f(y)]: [f(a="x")]', ("See [1, 2] and [f] and [f(y)]:", X)),
        ("[f(a=\"x\"), f(a='y')]", ("", TWO)),
        ('[f(a="x") , f(a="y",),]', ("", TWO)),
        ('[f("x")]', ("", X)),
        ("[f(a=x)]", ("", X)),
        ('[f(a="x"', ("", X)),
        ('[f(a="x', ("", X)),
        ('[f(a="x"]', ("", X)),
        ('[f(a="x"), f(', ("f(", X)),
        ('[f(a="x"), nope(b=1)]', ("nope(b=1)]", X)),
        ("[f(a='''x''')]", ("", X)),
        ("[f(a=5)]", ("", [("f", {"a": "5"})])),
        ("[f(a=r'\\d')]", ("", [("f", {"a": "\\d"})])),
        ("[f(a='it\\'s \\x41\\n\\d')]", ("", [("f", {"a": "it's A\n\\d"})])),
        ('[f(a="]), f(a=(")]', ("", [("f", {"a": "]), f(a=("})])),
        (
            "[t(i='5', b=true, x=1_000, l=(1, '2'), q=None, o={'n': '1', 's': 2})]",
            (
                "",
                [
                    (
                        "t",
                        {
                            "i": 5,
                            "b": True,
                            "x": 1000,
                            "l": [1, 2],
                            "q": None,
                            "o": {"n": 1, "s": "2"},
                        },
                    )
                ],
            ),
        ),
        ('<|python_start|>[f(a="x")]<|python_end|>', ("", X)),
        *(
            (text, (text, []))
            for text in ("[1, 2]", "[g(a=1)]", "a[f(x)]", "[f(__import__('os'))]")
        ),
    ],
)
def test_f08_pythonic(text: str, expected: Expected) -> None:
    reads(parser("pythonic"), text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"So [TOOL_CALLS][{ONE}]", ("So", X)),
        (f"[TOOL_CALLS] [{ONE}, {ONE}", ("", [*X, *X])),
        (f"[TOOL_CALLS]{ONE}", ("", X)),
        (f"[{ONE}]", ("", X)),
        ('[TOOL_CALLS]f{"a": "x"}</s>', ("", X)),
        ('[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"a": "x"}', ("", X)),
        ("[TOOL_CALLS]f[ARGS]{'a': 'x',}", ("", X)),
        ('[TOOL_CALLS]f{"a": "x', ("", X)),
        ('[TOOL_CALLS]f{"a": "x}[TOOL_CALLS]f{"a": "y"}', ("", TWO)),
        ('[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}', ("", [("f", {"a": "[TOOL_CALLS]"})])),
        ('no [TOOL_CALLS] no [TOOL_CALLS]f{"a": "x"}', ("no [TOOL_CALLS] no", X)),
        ("see [1](x) [TOOL_CALLS]", ("see [1](x) [TOOL_CALLS]", [])),
    ],
)
def test_mistral(text: str, expected: Expected) -> None:
    reads(parser("mistral"), text, expected)


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [
        (lambda: NamedCall("f", TOOLS), '{"a": "x', ("", X)),
        (lambda: NamedCall("f", TOOLS), '\n{"a": 5}', ("", [("f", {"a": "5"})])),
        (lambda: NamedCall("f"), "{", ("", [("f", {})])),
        (lambda: NamedCall("f"), "", ("", [])),
        (lambda: RequiredCalls(TOOLS), '[{"name": "f", "parameters": {"a": "x', ("", X)),
        (lambda: RequiredCalls(TOOLS), f"{L}", ("", X)),
        (lambda: RequiredCalls(TOOLS), "I cannot", ("I cannot", [])),
    ],
)
def test_enforced_calls_cut_off(make: Callable[[], Parser], text: str, expected: Expected) -> None:
    reads(make, text, expected)
