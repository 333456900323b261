"""Answers that a grammar made to be calls: tool_choice "required" or a function's name."""

from __future__ import annotations

from jaxengine.frontend.tools.base import Event
from jaxengine.frontend.tools.json_call import JsonCalls


class RequiredCalls:
    """The answer is a JSON list of calls."""

    def __init__(self) -> None:
        self._calls = JsonCalls()

    def feed(self, text: str) -> list[Event]:
        out: list[Event] = []
        if not (self._calls.done or self._calls.failed):
            self._calls.feed(text, out)
        return out

    def finish(self) -> list[Event]:
        return []


class NamedCall:
    """The answer is the arguments of the one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        pieces = [Event("arguments", text)]
        if not self._begun:
            self._begun = True
            return [Event("call", self._name), *pieces]
        return pieces

    def finish(self) -> list[Event]:
        return []
