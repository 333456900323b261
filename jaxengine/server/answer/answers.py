"""The text of an answer, taken apart: content, reasoning and calls, whole or as deltas."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from msgspec import UNSET

from jaxengine.config import HARMONY_PARSERS, ServerConfig
from jaxengine.server.answer.tools import ToolChoice
from jaxengine.server.openai.bodies import Delta, FunctionCall, Message, ToolCall
from jaxengine.text.reasoning import Harmony, Start, Think
from jaxengine.text.reasoning.think import BEGIN as THINK
from jaxengine.text.reasoning.think import END as THOUGHT
from jaxengine.text.tools import (
    NamedCall,
    Plain,
    RequiredCalls,
    make_tool_parser,
)
from jaxengine.text.tools.base import Event, Parser
from jaxengine.text.tools.hermes import BEGIN as CALL
from jaxengine.text.tools.hermes import END as CALLED
from jaxengine.text.tools.llama3_json import PYTHON_TAG
from jaxengine.text.tools.mistral import ARGS, CALL_ID
from jaxengine.text.tools.mistral import BEGIN as TOOL_CALLS


def is_harmony(config: ServerConfig) -> bool:
    """The model writes messages in channels; one parser reads reasoning and calls."""
    return config.reasoning_parser in HARMONY_PARSERS or config.tool_call_parser in HARMONY_PARSERS


def reads_answers(config: ServerConfig, choice: ToolChoice) -> bool:
    """Whether answers are more than plain text."""
    if config.reasoning_parser is not None or choice.enforced:
        return True
    return is_harmony(config) or choice.mode == "auto"


def make_parser(
    config: ServerConfig, choice: ToolChoice, start: Start, constrained: bool
) -> Parser:
    """For one answer. `constrained`: a grammar makes it, without channels."""
    if choice.enforced:
        rest: Parser = (
            NamedCall(choice.tools[0]["function"]["name"], choice.tools)
            if choice.mode == "named"
            else RequiredCalls(choice.tools)
        )
    elif is_harmony(config):
        return Harmony(inside=constrained, tools=choice.tools)
    elif choice.mode == "auto" and config.tool_call_parser is not None:
        rest = make_tool_parser(config.tool_call_parser, choice.tools)
    else:
        rest = Plain()
    return rest if start == "outside" else Think(start, rest)


def markers(config: ServerConfig, choice: ToolChoice) -> tuple[str, ...]:
    """Tokens that the parsers must see in the text, special or not."""
    found: tuple[str, ...] = ()
    if is_harmony(config):
        return ("<|channel|>",)
    if config.reasoning_parser is not None:
        found = (THINK, THOUGHT)
    if choice.mode == "auto":
        of = {
            "llama3_json": (PYTHON_TAG,),
            "mistral": (TOOL_CALLS, ARGS, CALL_ID),
            "pythonic": (),
        }
        found += of.get(config.tool_call_parser or "", (CALL, CALLED))
    return found


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates take ids of 9 characters only."""
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True)
class Style:
    """How the answers of a request are given out."""

    parser: Callable[[], Parser]
    reasoning: bool = True  # False: left out
    calls: bool = True  # False: their arguments are content
    one_call: bool = False  # further ones are left out
    short_ids: bool = False


def _joined(events: Iterable[Event]) -> Iterable[Event]:
    """What follows each other in one kind as one: a long answer may have very many."""
    for kind, group in groupby(events, lambda event: event.kind):
        if kind == "call":
            yield from group
        else:
            yield Event(kind, "".join(event.text for event in group))


class Answer:
    """One answer under way."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._parser = style.parser()
        self._num_calls = 0
        self._skipping = False  # the call under way is one too many
        self.reasoned = False

    @property
    def called(self) -> bool:
        """A call was given out."""
        return self._num_calls > 0

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.called else reason

    def delta(self, text: str, finished: bool) -> Delta:
        """What is new with this text; empty when it is held back."""
        delta = Delta()
        for kind, piece in _joined(self._events(text, finished)):
            if kind == "content":
                delta.content = (delta.content or "") + piece
            elif kind == "reasoning":
                delta.reasoning_content = (delta.reasoning_content or "") + piece
            elif kind == "call":
                delta.tool_calls.append(self._new_call(piece))
            else:
                at = self._num_calls - 1
                last = delta.tool_calls[-1] if delta.tool_calls else None
                if last is None:
                    last = ToolCall(FunctionCall(), index=at)
                    delta.tool_calls.append(last)
                last.function.arguments += piece
        delta.reasoning = delta.reasoning_content
        return delta

    def message(self, text: str, echo: str = "") -> Message:
        """The whole answer."""
        delta = self.delta(text, finished=True)
        for call in delta.tool_calls:
            call.index = UNSET
        content = echo + (delta.content or "")
        empty = not content and (self.called or self.reasoned)
        return Message(
            "assistant",
            None if empty else content,
            None,
            delta.reasoning_content,
            delta.reasoning,
            delta.tool_calls,
        )

    def _new_call(self, name: str) -> ToolCall:
        made = _short_id() if self._style.short_ids else _call_id()
        index = self._num_calls
        self._num_calls += 1
        return ToolCall(FunctionCall(name), made, "function", index)

    def _events(self, text: str, finished: bool) -> Iterable[Event]:
        style = self._style
        events = self._parser.feed(text) if text else []
        if finished:
            events = events + self._parser.finish()
        for event in events:
            kind = event.kind
            if kind == "reasoning":
                self.reasoned = True
                if style.reasoning:
                    yield event
            elif kind in ("call", "arguments") and not style.calls:
                if kind == "arguments":
                    yield Event("content", event.text)
            elif kind == "call" and style.one_call and self._num_calls:
                self._skipping = True
            elif kind == "arguments" and self._skipping:
                continue
            else:
                yield event
