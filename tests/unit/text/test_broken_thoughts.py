"""Thoughts and calls when tags between them are missing, doubled or only talked about; gpt-oss's
messages with wrong headers; and which text is the answer."""

from __future__ import annotations

from typing import Any

import pytest
from test_broken_calls import TOOLS, WHOLE, call
from test_call_properties import whole_and_cut
from test_tool_parsers import Found, read

from jaxengine.text.reasoning import AnswerGate, Harmony, Start, Think
from jaxengine.text.tools import Plain, make_tool_parser

F = ["call", "f", '{"a": "x"}']
JSON = call('{"a": "x"}')
LLAMA = '{"name": "f", "parameters": {"a": "x"}}'
HM = ["reasoning", "hm"]

THOUGHTS: list[tuple[str, str, Found]] = [
    # a call where the thoughts were not closed
    ("qwen3_coder", f"hm\n{WHOLE}", [HM, F]),
    ("qwen3_coder", f"hm\n{WHOLE}\n</think>", [HM, F]),
    ("qwen3_coder", f"hm\n{WHOLE}\n</think>\n\nDone.", [HM, F, ["content", "Done."]]),
    ("qwen3_coder", f"hm\n{WHOLE}\n{WHOLE}", [HM, F, F]),
    ("qwen3_coder", f"hm\n{WHOLE}\nDone.", [HM, F, ["content", "Done."]]),
    (
        "qwen3_coder",
        f"hm\n{WHOLE}\nmore\n</think>\nDone.",
        [HM, F, ["reasoning", "\nmore"], ["content", "Done."]],
    ),
    ("qwen3_coder", "hm\n" + WHOLE.replace("</parameter>\n", ""), [HM, F]),
    ("qwen3_coder", f"hm\n{JSON}", [HM, F]),
    ("qwen3", f"hm {JSON}", [HM, F]),
    ("hermes", f"hm {JSON}", [HM, F]),
    (
        "hermes",
        'hm <tool_call>{"arguments": {"a": "</think>"}, "name": "f"}</tool_call>',
        [HM, ["call", "f", '{"a": "</think>"}']],
    ),
    ("mistral", 'hm[TOOL_CALLS]f{"a": "x"}', [HM, F]),
    ("mistral", 'hm[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}]', [HM, F]),
    ("llama3_json", f"hm<|python_tag|>{LLAMA}", [HM, F]),
    ("llama3_json", f"hm\n{LLAMA}", [HM, F]),
    ("llama3_json", f"hm\n```json\n{LLAMA}\n```", [HM, F]),
    ("pythonic", 'hm\n[f(a="x")]', [HM, F]),
    # what is no call, or not one to carry out
    *(
        (name, f"{thought}\n</think>\nSo", [["reasoning", thought], ["content", "So"]])
        for name, thought in (
            ("qwen3_coder", "I use <tool_call> next"),
            ("qwen3_coder", "I write <tool_call><function=f> next"),
            ("qwen3_coder", "so `<tool_call>\n<function=f>\n<parameter=a>` it is"),
            ("qwen3_coder", f"like\n```\n{WHOLE}\n```\nthat"),
            ("qwen3_coder", WHOLE.replace("=f", "=unknown")),
            ("hermes", f"so `{JSON}` it is"),
            ("hermes", '<tool_call>{"name": "Bob", "arguments": {}}</tool_call>'),
            ("hermes", f"so {LLAMA}"),
            ("hermes", '<tool_call>{"arguments": {"a": "never closed'),
            ("mistral", "with [TOOL_CALLS] then"),
            ("llama3_json", f"{LLAMA}\nwould be it"),
            ("llama3_json", f"so\n{LLAMA}"),
            ("llama3_json", f"{{\n{LLAMA} no"),
            ("pythonic", '[f(a="x")]\nwould be it'),
            ("pythonic", "[1, 2]"),
        )
    ),
    ("qwen3_coder", "never closed <tool_call>", [["reasoning", "never closed <tool_call>"]]),
    ("llama3_json", f"so {LLAMA}", [["reasoning", f"so {LLAMA}"]]),
    # tags
    ("hermes", "hm</think></think>\n\nx", [HM, ["content", "x"]]),
    ("hermes", "<think>\n<think>\nhm\n</think>x", [HM, ["content", "x"]]),
    ("hermes", "hm</think>\n<think>so</think>x", [["reasoning", "hm\nso"], ["content", "x"]]),
    (
        "hermes",
        'the "</think>" tag</think>x',
        [["reasoning", 'the "</think>" tag'], ["content", "x"]],
    ),
    ("hermes", "a `</think>`</think>`x`", [["reasoning", "a `</think>`"], ["content", "`x`"]]),
    ("hermes", 'say "hi"</think>"x"', [["reasoning", 'say "hi"'], ["content", '"x"']]),
    ("hermes", 'hm "</think>', [["reasoning", 'hm "']]),
    (
        "hermes",
        "don't '</think>' it</think>x",
        [["reasoning", "don't '</think>' it"], ["content", "x"]],
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), THOUGHTS)
def test_f02_thoughts_and_calls(name: str, text: str, expected: Found) -> None:
    assert whole_and_cut(lambda: Think("inside", make_tool_parser(name, TOOLS)), text) == expected
    tagged = f"<think>\n{text}"
    assert whole_and_cut(lambda: Think("maybe", make_tool_parser(name, TOOLS)), tagged) == expected


def test_thoughts_without_calls_stay_as_they_are() -> None:
    found = whole_and_cut(lambda: Think("inside", Plain()), f"hm\n{WHOLE}")
    assert found == [["reasoning", f"hm\n{WHOLE}"]]


A = "<|channel|>analysis<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ARGS = '{"a": "x"}'
HARMONY: list[tuple[str, Found]] = [
    # the recipient
    *(
        (f"{header}<|message|>{ARGS}<|call|>", [F])
        for header in (
            "<|channel|>commentary to=f <|constrain|>json",
            "<|channel|>commentary to=functions.f",
            "<|channel|>commentary to=function.f code",
            "<|channel|>commentary to=functions.f<|channel|>commentary json",
            "<|channel|>commentary to=functions.f<|constrain|>response",
            "<|channel|>analysis to=functions.f code",
            "<|channel|>analysis to=f",
            "<|start|>assistant to=f<|channel|>commentary json",
            " to=functions.f<|channel|>commentary <|constrain|>json",
            "commentary to=f",
            "<|channel|>commentary to=assistant<|channel|>commentary to=f json",
            "<|channel|>––commentary to=functions.f",
            "<|channel|>commentary functions.f json",
        )
    ),
    (f"<|channel|>commentary to=f <|constrain|>json{ARGS}<|call|>", [F]),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", [["call", "other", "{}"]]),
    ("<|channel|>commentary to=python code<|message|>1<|call|>", [["reasoning", "1"]]),
    ("<|channel|>commentary to=browser.search<|message|>{}", [["reasoning", "{}"]]),
    ("<|channel|>analysis to=functions.f code<|message|>1 + 1<|call|>", [["reasoning", "1 + 1"]]),
    ("<|channel|>commentary to=assistant<|message|>x", [["reasoning", "x"]]),
    ("<|channel|>final to=user<|message|>x", [["content", "x"]]),
    # the arguments
    (f'{TO_F}{{"a": "x', [F]),
    (f"{TO_F}{{'a': 'x',}}<|call|>", [["call", "f", "{'a': 'x'}".replace("'", '"')]]),
    (f'{TO_F}{{"a": 5}}<|call|>', [["call", "f", '{"a": "5"}']]),
    (f"{TO_F}<|call|>", [["call", "f", "{}"]]),
    (f"{TO_F}x<|call|>", [F]),
    (f"{TO_F}{ARGS}{ARGS}<|call|>", [F, ["reasoning", ARGS]]),
    *(
        (
            f'{TO_F}{{"a": "the {mark} mark"}}<|call|>',
            [["call", "f", f'{{"a": "the {mark} mark"}}']],
        )
        for mark in ("<|call|>", "<|end|>", "<|start|>", "<|channel|>")
    ),
    (
        f'{TO_F}{{"a": "x<|call|><|start|>assistant<|channel|>final<|message|>"}}',
        [F, ["content", '"}']],
    ),
    # what closes a message
    (f"{A}hm<|end|><|start|>assistant{TO_F}{ARGS}", [HM, F]),
    (f"{A}hm{TO_F}{ARGS}<|start|>assistant<|channel|>final<|message|>x", [HM, F, ["content", "x"]]),
    (f"{A}hm<|end|>assistant<|channel|>final<|message|>x", [HM, ["content", "x"]]),
    ("<|channel|>final<|message|>x<|return|>y", [["content", "x\ny"]]),
    # headers that lead nowhere
    (
        f"<|channel|>We should check<|end|><|start|>assistant{A}hm",
        [["reasoning", "We should check\nhm"]],
    ),
    (f"<|channel|>commentary<|end|><|start|>assistant{A}hm", [HM]),
    ("<|channel|>final\nHello there", [["content", "\nHello there"]]),
    (f"<|channel|>final\n{'word ' * 400}", [["content", f"\n{'word ' * 400}"]]),
    ("<|channel|>commenta", []),
    ("final answer", [["content", "final answer"]]),
    ("to be", [["content", "to be"]]),
    ("assistant", [["content", "assistant"]]),
    ("<b>", [["content", "<b>"]]),
    ("<|channel|>commentary<|message|>So:<|end|>", [["content", "So:"]]),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_f11_harmony(text: str, expected: Found) -> None:
    assert whole_and_cut(lambda: Harmony(tools=TOOLS), text) == expected


def test_a_tool_may_be_called_like_a_built_in_one() -> None:
    made: list[Any] = [{"type": "function", "function": {"name": "python"}}]
    text = "<|channel|>analysis to=python code<|message|>{}<|call|>"
    assert whole_and_cut(lambda: Harmony(tools=made), text) == [["call", "python", "{}"]]


GATES: list[tuple[str, Start, str, str]] = [
    ("qwen3", "maybe", "<think>\nQ: why?\n</think>\n\nAnswer Q: next", "Answer Q: next"),
    ("qwen3", "maybe", "Answer", "Answer"),
    ("qwen3", "maybe", " <thin", " <thin"),
    ("qwen3", "outside", "<think>x", "<think>x"),
    ("deepseek_r1", "inside", "hm </think>x</think>y", "x</think>y"),
    ("deepseek_r1", "inside", "the `</think>` tag", ""),
    ("deepseek_r1", "inside", f"hm\n{WHOLE}", WHOLE),
    ("deepseek_r1", "inside", "use <tool_call> there", ""),
    ("openai_gptoss", "maybe", f"{A}hm<|end|><|start|>assistant{TO_F}{ARGS}<|call|>", ""),
    (
        "gpt-oss",
        "maybe",
        f"<|channel|>commentary<|message|>One<|end|><|start|>assistant{A}hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Two<|return|>",
        "OneTwo",
    ),
    ("gpt-oss", "maybe", "<|channel|>free text<|end|><|start|>assistant<|channel|>final", ""),
    ("gpt-oss", "outside", "x", "x"),
]


@pytest.mark.parametrize(("parser", "start", "text", "answer"), GATES)
def test_f01_which_text_is_the_answer(parser: str, start: Start, text: str, answer: str) -> None:
    for size in (1, 3, 50, 1000):
        gate = AnswerGate(parser, start, "qwen3_coder", TOOLS)
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        pieces = [found for piece in cut for found in gate.push(piece)] + gate.flush()
        assert "".join(piece for piece, _ in pieces) == text
        assert "".join(piece for piece, of_answer in pieces if of_answer) == answer


def test_the_gate_lets_thoughts_through_at_once() -> None:
    gate = AnswerGate("qwen3", "inside", "qwen3_coder", TOOLS)
    thought = 'Let me see: {"a": [1]} and <b>that</b>.\nSo'
    given = ""
    for at, char in enumerate(thought):
        given += "".join(piece for piece, of_answer in gate.push(char) if not of_answer)
        assert len(given) >= at - 10
    assert gate.push("</think>\n\nx") == [("</think>", False), ("\n\n", False), ("x", True)]


def test_reasoning_that_is_left_out_has_its_calls_all_the_same() -> None:
    found = read(Think("maybe", make_tool_parser("qwen3_coder", TOOLS)), [f"<think>{WHOLE}"])
    assert found == [F]
