"""Which parts of a text are the answer, for rules that hold for the answer alone (stop strings)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.config import HARMONY_PARSERS
from jaxengine.text.reasoning.channels import Channels
from jaxengine.text.reasoning.thoughts import Start, Thoughts
from jaxengine.text.tools import make_tool_parser
from jaxengine.text.tools.calls import Calls
from jaxengine.text.tools.schema import Tools


class AnswerGate:
    """Takes the text in pieces of any size, and gives it back whole, in pieces that are answer or
    are not. It cuts where the reasoning parser of that name does: what is answer here, that one
    gives to content and calls (with channels: to content). A few characters are held back while
    they may be a tag, more only where a call may interrupt the thoughts.

    One thing differs: text between a call that interrupted the thoughts and their late </think> is
    reasoning there, and answer here.

    `start` is where the text begins (`thinking_start`); with channels, "outside" means that the
    header of the final message is in the prompt.
    """

    def __init__(
        self,
        parser: str,
        start: Start,
        tool_parser: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._parts: Thoughts | Channels
        self._answer = "answer"
        if parser in HARMONY_PARSERS:
            self._parts = Channels(start == "outside", Tools(tools))
            self._answer = "content"
            return
        calls = None
        if tool_parser is not None and tool_parser not in HARMONY_PARSERS and tools:
            calls = make_tool_parser(tool_parser, tools)
        self._parts = Thoughts(start, calls.form if isinstance(calls, Calls) else None)

    def push(self, text: str) -> list[tuple[str, bool]]:
        """The pieces that are certain with this much more text, and whether each is answer."""
        return [
            (piece[1], piece[0] == self._answer) for piece in self._parts.push(text) if piece[1]
        ]

    def flush(self) -> list[tuple[str, bool]]:
        """The text has ended: what was held back."""
        return [(p[1], p[0] == self._answer) for p in self._parts.finish() if p[1]]
