"""Strict tools under "auto" with mistral, pythonic, qwen3_coder and gpt-oss: what the grammar lets
through, the parser reads as calls that follow the schemas."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llguidance
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.server.answer.tool_grammar import free_calls
from jaxengine.server.answer.tools import ToolChoice
from jaxengine.server.errors import ApiError
from jaxengine.structured.probe import BYTES, ByteTokenizer, build, limits
from jaxengine.text.reasoning import Harmony
from jaxengine.text.tools import make_tool_parser

HARMONY = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"]
MARKS = [*HARMONY, "[TOOL_CALLS]", "[ARGS]"]
SMALL: Any = ByteTokenizer()
PROBE = llguidance.LLTokenizer(SMALL, eos_token=[BYTES])


@functools.cache
def tokenizer(special: bool) -> tuple[tokenizers.Tokenizer, llguidance.LLTokenizer]:
    """A token a byte, and the marks as special tokens."""
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tk = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens([*(MARKS if special else []), "<eos>"])
    return tk, llguidance.LLTokenizer(tk.to_str(), eos_token=[tk.token_to_id("<eos>")])


def made_of(
    choice: ToolChoice, parser: str, special: bool, answer: StructuredOutputsParams | None = None
) -> StructuredOutputsParams:
    tk, _ = tokenizer(special)
    return free_calls(choice, answer, parser, tk.token_to_id if special else lambda _: None)


def fits(made: StructuredOutputsParams, text: str, special: bool) -> bool:
    """Whether an answer may be exactly `text`."""
    tk, known = tokenizer(special)
    built = build(PROBE, "grammar", str(made.grammar))
    assert "error" not in built, built
    matcher = llguidance.LLMatcher(known, built["grammar"], log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    ids = tk.encode(text).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def calls_of(parser: str, text: str, tools: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """As the client gets them."""
    reader = Harmony() if parser == "gpt-oss" else make_tool_parser(parser, tools)
    found: list[list[str]] = []
    for event in [*reader.feed(text), *reader.finish()]:
        if event.kind == "call":
            found.append([event.text, ""])
        elif event.kind == "arguments":
            found[-1][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in found]


def tool(
    name: str, strict: bool, required: Sequence[str] = (), **properties: Any
) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        "$defs": {"X": {"type": "integer"}},
    }
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


F = tool("f", True, ["a"], a={"$ref": "#/$defs/X"}, b={"type": "boolean"}, s={"type": "string"})
G = tool("g", False, x={"type": "string"})
AUTO = ToolChoice("auto", (F, G), (F, G))
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant"
XML = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n{}</function>\n</tool_call>"
S = "<parameter=s>\n{}\n</parameter>\n"

GOOD = [
    ("mistral", "hello", []),
    ("mistral", 'so [TOOL_CALLS][{"name": "f", "arguments": {"a":1}}]', [("f", {"a": 1})]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "g", "arguments": {"q":[]}}, {"name": "f", "arguments": {"a":1}}]',
        [("g", {"q": []}), ("f", {"a": 1})],
    ),
    ("mistral", '[TOOL_CALLS]f{"a":2,"s":"x"}', [("f", {"a": 2, "s": "x"})]),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a":2}[TOOL_CALLS]g[ARGS]{}',
        [("f", {"a": 2}), ("g", {})],
    ),
    ("pythonic", "", []),
    ("pythonic", "hello [f(", []),
    ("pythonic", "[f(a=1)]", [("f", {"a": 1})]),
    (
        "pythonic",
        '[f(a=1, b=True, s="x, (y)"), g()]',
        [("f", {"a": 1, "b": True, "s": "x, (y)"}), ("g", {})],
    ),
    (
        "pythonic",
        '[f(a=1,s=""), g(z=[1,{}], y=None)]',
        [("f", {"a": 1, "s": ""}), ("g", {"z": [1, {}], "y": None})],
    ),
    ("qwen3_coder", "hello <tool", []),
    ("qwen3_coder", "so " + XML.format(""), [("f", {"a": 1})]),
    ("qwen3_coder", XML.format(S.format("x\n<y>")), [("f", {"a": 1, "s": "x\n<y>"})]),
    (
        "qwen3_coder",
        XML.format("").replace("f>", "g>", 1).replace("=a", "=x") + "\n" + XML.format(""),
        [("g", {"x": "1"}), ("f", {"a": 1})],
    ),
    ("gpt-oss", f"{THOUGHT}<|channel|>final<|message|>hello", []),
    ("gpt-oss", f'{THOUGHT}{TO_F}{{"a":1}}', [("f", {"a": 1})]),
    (
        "gpt-oss",
        f"{THOUGHT}{THOUGHT.replace('analysis', 'commentary')} to=functions.f<|channel|>commentary"
        ' json<|message|>{"a":1}',
        [("f", {"a": 1})],
    ),
    ("gpt-oss", '<|channel|>commentary to=functions.g<|message|>{"q":1}', [("g", {"q": 1})]),
]


@pytest.mark.parametrize(("parser", "text", "calls"), GOOD)
def test_what_may_be_said(parser: str, text: str, calls: list[tuple[str, Any]]) -> None:
    assert calls_of(parser, text, AUTO.tools) == calls
    for special in (True,) if parser == "gpt-oss" else (True, False):
        assert fits(made_of(AUTO, parser, special), text, special)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a":"x"}}]'),
        ("mistral", '[TOOL_CALLS][{"name": "h", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]f{}"),
        ("mistral", "[TOOL_CALLS]"),
        ("pythonic", "[f()]"),
        ("pythonic", '[f(a="x")]'),
        ("pythonic", "[f(b=True, a=1)]"),
        ("pythonic", "[h()]"),
        ("pythonic", "[1, 2]"),
        ("qwen3_coder", XML.format("").replace("1", "x")),
        ("qwen3_coder", XML.format("").replace("f>", "h>", 1)),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("gpt-oss", f'{THOUGHT}{TO_F}{{"a":"x"}}'),
        ("gpt-oss", f"{THOUGHT}{TO_F.replace('.f', '.h')}{{}}"),
        ("gpt-oss", "hello"),
    ],
)
def test_what_may_not(parser: str, text: str) -> None:
    for special in (True,) if parser == "gpt-oss" else (True, False):
        assert not fits(made_of(AUTO, parser, special), text, special)


@pytest.mark.parametrize(
    ("parser", "one", "two"),
    [
        ("mistral", "[TOOL_CALLS]g{}", "[TOOL_CALLS]g{}[TOOL_CALLS]g{}"),
        ("pythonic", "[g()]", "[g(), g()]"),
        ("qwen3_coder", XML.format(""), XML.format("") * 2),
    ],
)
def test_one_call_at_most(parser: str, one: str, two: str) -> None:
    for special in (True, False):
        single = made_of(replace(AUTO, parallel=False), parser, special)
        assert fits(single, one, special) and not fits(single, two, special)


@pytest.mark.parametrize(
    ("parser", "call", "answer"),
    [
        ("mistral", "[TOOL_CALLS]g{}", "12"),
        ("qwen3_coder", XML.format(""), "12"),
        ("gpt-oss", f'{THOUGHT}{TO_F}{{"a":1}}', f"{THOUGHT}<|channel|>final<|message|>12"),
    ],
)
def test_calls_or_an_answer_of_a_form(parser: str, call: str, answer: str) -> None:
    made = made_of(AUTO, parser, True, StructuredOutputsParams(json={"type": "integer"}))
    assert fits(made, call, True) and fits(made, answer, True)
    assert not fits(made, answer.replace("12", "x"), True)


@pytest.mark.parametrize(
    ("parser", "properties", "reason"),
    [
        ("pythonic", {"a b": {}}, "'a b' cannot be the name of an argument"),
        ("pythonic", {"a": {"items": {"$ref": "#"}}}, "refer to themselves"),
        ("qwen3_coder", {"a": {"type": "string", "pattern": "x"}}, "'a' uses 'pattern'"),
        ("qwen3_coder", {"a>": {}}, "'a>' cannot be the name of a parameter"),
    ],
)
def test_schemas_that_cannot_be_enforced(
    parser: str, properties: dict[str, Any], reason: str
) -> None:
    choice = ToolChoice("auto", (tool("f", True, **properties),))
    with pytest.raises(ApiError) as caught:
        made_of(choice, parser, True)
    assert reason in caught.value.message and caught.value.param == "tools"


def test_other_things_that_cannot_be_enforced() -> None:
    with pytest.raises(ApiError, match=r"need the special token <\|channel\|>"):
        made_of(AUTO, "gpt-oss", False)
    choice = ToolChoice("auto", (tool("f", True, ["b"], a={}),))
    with pytest.raises(ApiError, match="require 'b', which is not among"):
        made_of(choice, "pythonic", True)
    with pytest.raises(ApiError, match="cannot be enforced with the parser pythonic"):
        made_of(AUTO, "pythonic", True, StructuredOutputsParams(json={"type": "integer"}))
