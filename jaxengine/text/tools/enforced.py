"""Answers that a grammar made to be calls: tool_choice "required" or a function's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.text.tools.arguments import Arguments
from jaxengine.text.tools.base import Event, pieces
from jaxengine.text.tools.json_call import JsonCall, JsonCalls
from jaxengine.text.tools.schema import Tools


class RequiredCalls:
    """The answer is a JSON list of calls. If it is none (the grammar was not the model's), it is
    content."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tools = Tools(tools)
        self._calls: JsonCalls | JsonCall | None = None
        self._raw: list[str] = []
        self._over = False

    def feed(self, text: str) -> list[Event]:
        out: list[Event] = []
        if self._over:
            return [Event("content", text)] if self._raw and text else []
        if self._calls is None:
            text = text.lstrip()
            if not text:
                return []
            self._calls = JsonCall(self._tools) if text[0] == "{" else JsonCalls(self._tools)
        for piece in pieces(text):
            if self._over:
                return out + self.feed(text)
            if not self._calls.started:
                self._raw.append(piece)
            self._calls.feed(piece, out)
            self._settle(out)
            text = text[len(piece) :]
        return out

    def finish(self) -> list[Event]:
        out: list[Event] = []
        if self._calls is not None and not self._over:
            self._calls.finish(out)
            self._settle(out)
        return out

    def _settle(self, out: list[Event]) -> None:
        assert self._calls is not None
        if self._calls.started:
            self._raw = []
        self._over = self._calls.done or self._calls.failed
        if self._calls.failed and self._raw:
            out.append(Event("content", "".join(self._raw)))


class NamedCall:
    """The answer is the arguments of the one function."""

    def __init__(self, name: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._name = name
        self._arguments = Arguments(Tools(tools).shape(name))
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        if not text or self._arguments.done:
            return []
        given = self._arguments.feed(text)
        pieces = [Event("arguments", given)] if given else []
        if not self._begun:
            self._begun = True
            return [Event("call", self._name), *pieces]
        return pieces

    def finish(self) -> list[Event]:
        if not self._begun or self._arguments.done:
            return []
        given = self._arguments.finish()
        return [Event("arguments", given)] if given else []
