"""Calls while they come: promptly, cut off anywhere, and whatever a hostile text does."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from test_broken_calls import TOOLS, WHOLE, call, parser, xml
from test_call_properties import calls_in
from test_tool_parsers import read

from jaxengine.server.answer.answers import Answer, Style
from jaxengine.text.reasoning import Start, Think
from jaxengine.text.tools import Parser, make_tool_parser


def streamed(make: Callable[[], Parser], text: str) -> list[tuple[int, str, str]]:
    """When each event comes, in characters that are still to come; and the event."""
    reader = make()
    found = []
    for at, char in enumerate(text):
        found += [(len(text) - at - 1, *event) for event in reader.feed(char)]
    return found


BIG = "line of text, with (brackets) and 'quotes'.\n" * 40


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", call(json.dumps({"path": "p", "content": BIG}), "w")),
        ("llama3_json", f'Sure. {{"name": "w", "parameters": {json.dumps({"content": BIG})}}}'),
        ("mistral", f"[TOOL_CALLS]w{json.dumps({'content': BIG})}"),
        ("pythonic", f"[w(content={BIG!r})]"),
        ("qwen3_coder", xml(("path", "p"), ("content", BIG), name="w")),
    ],
)
def test_long_strings_come_as_they_are_written(name: str, text: str) -> None:
    seen, behind = 0, 0
    for left, kind, piece in streamed(parser(name), text):
        if kind == "arguments":
            seen += len(piece)
            behind = max(behind, len(text) - left - seen)
    assert seen > len(BIG) and behind < 160  # the tags and names before, and a little


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic"])
def test_prose_comes_at_once(name: str) -> None:
    text = 'Well, {this} is [a list](of) <b>things</b>: {"k": 1}, f(x), `code` and "more".'
    given = ""
    reader = parser(name)()
    for at, char in enumerate(text):
        given += "".join(event.text for event in reader.feed(char))
        assert len(given) >= at - 12, (text[: at + 1], given)
    assert given + "".join(event.text for event in reader.finish()) == text


@pytest.mark.parametrize("way", ["stream", "whole"])
def test_an_answer_cut_by_its_length_has_arguments_that_parse(way: str) -> None:
    for size in range(30, len(WHOLE)):
        answer = Answer(Style(lambda: Think("maybe", make_tool_parser("qwen3_coder", TOOLS))))
        if way == "whole":
            calls = answer.message(WHOLE[:size]).tool_calls
            shown = [call.function.arguments for call in calls]
        else:
            deltas = [answer.delta(char, False) for char in WHOLE[:size]]
            deltas.append(answer.delta("", True))
            pieces = [c.function.arguments for d in deltas for c in d.tool_calls]
            shown = ["".join(pieces)] if pieces else []
        assert all(isinstance(json.loads(arguments), dict) for arguments in shown)
        assert answer.finish_reason("length") == "length"


STARTS: tuple[Start, ...] = ("inside", "outside")
HOSTILE = [
    "{",
    "[",
    '"',
    "\\",
    " ",
    "\n",
    "<",
    "</",
    "```",
    '{"arguments":',
    '<tool_call>{"name": "f", "arguments": {"a": "',
    "<tool_call>\n<function=f>\n<parameter=a>\nx\n",
    "</parameter>\n",
    '[f(a="',
    '[f(a="x"} ',
    '[TOOL_CALLS]f{"a": "',
    "`</think>` ",
]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic"])
def test_hostile_text_ends_and_parses(name: str) -> None:
    for unit in HOSTILE:
        for lead in ("", '<tool_call>{"name": "f", "arguments": {"a": ', "[f(a=", "[TOOL_CALLS]f{"):
            text = lead + unit * (1200 // len(unit))
            pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
            for start in STARTS:
                whole = read(Think(start, make_tool_parser(name, TOOLS)), [text])
                assert read(Think(start, make_tool_parser(name, TOOLS)), pieces) == whole
                for _, arguments in calls_in(whole):
                    assert isinstance(arguments, dict)


@pytest.mark.parametrize("opened", ["[", '{"a": ', '[{"a": '])
@pytest.mark.parametrize("closed", [True, False])
def test_deep_arguments_parse(opened: str, closed: bool) -> None:
    """JSON readers have a limit: what is deeper goes out as text."""
    closers = {"[": "]", '{"a": ': "}", '[{"a": ': "}]"}[opened]
    value = opened * 5000 + "1" + closers * 5000 * closed
    text = f'<tool_call>{{"name": "bare", "arguments": {{"v": {value}}}}}</tool_call>'
    [(_, arguments)] = calls_in(read(make_tool_parser("hermes", TOOLS), [text]))
    assert list(arguments) == ["v"]
