"""Reasoning apart from answers and calls, in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_parsers import TOOLS, Found, check, cut, read

from jaxengine.text.reasoning import Harmony, Start, Think, thinking_start
from jaxengine.text.tools import Plain, make_tool_parser

CALL = '<tool_call>{"name":"f"}</tool_call>'
CASES: list[tuple[Start, str, Found]] = [
    (
        "maybe",
        f"<think>\n\nhm  <b\n\n</think>\n\nSo {CALL}",
        [["reasoning", "hm  <b"], ["content", "So"], ["call", "f", "{}"]],
    ),
    ("inside", f"hm</think>{CALL}", [["reasoning", "hm"], ["call", "f", "{}"]]),
    ("inside", "\n<think>\nhm</think>\nx", [["reasoning", "hm"], ["content", "x"]]),
    ("inside", " cut off </th", [["reasoning", "cut off </th"]]),
    ("inside", "</think>\n\nx ", [["content", "x "]]),
    ("maybe", " no tags ", [["content", " no tags "]]),
    ("maybe", "<thin", [["content", "<thin"]]),
    ("maybe", "<think></think>", []),
    ("outside", "<think>x</think>", [["content", "<think>x</think>"]]),
]


@pytest.mark.parametrize(("start", "text", "expected"), CASES)
def test_think(start: Start, text: str, expected: Found) -> None:
    check(lambda: Think(start, make_tool_parser("hermes", TOOLS)), text, expected)


@pytest.mark.parametrize(
    ("parser", "prompt", "continued", "start"),
    [
        ("deepseek_r1", "<｜Assistant｜><think>\n", "", "inside"),
        ("deepseek_r1", "<｜Assistant｜>", "", "inside"),
        ("qwen3", "<|im_start|>assistant\n", "", "maybe"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "outside"),
        ("qwen3", "assistant\n<think>\nhm", "<think>\nhm", "inside"),
        ("qwen3", "assistant\n<think>\nhm</think>So", "<think>\nhm</think>So", "outside"),
        ("deepseek_r1", "assistant\nSo", "So", "outside"),
    ],
)
def test_where_an_answer_begins(parser: str, prompt: str, continued: str, start: Start) -> None:
    assert thinking_start(parser, prompt, continued) == start


ANALYSIS = "<|channel|>analysis<|message|>"
HARMONY: list[tuple[str, Found]] = [
    (
        f"{ANALYSIS}one<|end|><|start|>assistant{ANALYSIS}two<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
        [["reasoning", "one\ntwo"], ["call", "f", '{"a":1}']],
    ),
    ("<|channel|>final<|message|>hi <|x|> you<|return|>", [["content", "hi <|x|> you"]]),
    (
        "<|channel|>commentary<|message|>First<|end|><|start|>assistant to=functions.g"
        "<|channel|>commentary json<|message|><|call|>",
        [["content", "First"], ["call", "g", "{}"]],
    ),
    (f"{ANALYSIS}cut <|en", [["reasoning", "cut <|en"]]),
    ("<|channel|>ana", []),
    ("plain", [["content", "plain"]]),
    ("t", [["content", "t"]]),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_harmony(text: str, expected: Found) -> None:
    check(Harmony, text, expected)


def test_harmony_in_its_final_channel() -> None:
    check(lambda: Harmony(inside=True), '{"a": 1}<|return|>', [["content", '{"a": 1}']])


_parts = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<|channel|>", "analysis", "final", "commentary", "<|message|>"]
        + ["<|end|>", "<|start|>", "assistant", "<|call|>", " to=functions.f", "\n", " ", "x", "<|"]
    ),
    max_size=14,
)


@settings(max_examples=80, deadline=None)
@given(parts=_parts, seed=st.integers(0, 1000))
def test_noise_reads_the_same_in_pieces(parts: list[str], seed: int) -> None:
    text = "".join(parts)
    pieces = cut(text, seed)
    assert read(Harmony(), pieces) == read(Harmony(), [text])
    for start in ("inside", "maybe", "outside"):
        assert read(Think(start, Plain()), pieces) == read(Think(start, Plain()), [text])
