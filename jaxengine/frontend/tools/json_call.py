"""A call written as a JSON object with the function's name and its arguments, read as it comes."""

from __future__ import annotations

import json
from collections.abc import Collection

from jaxengine.frontend.tools.base import Event
from jaxengine.frontend.tools.nesting import Nesting

_NAME = ("name",)
_ARGUMENTS = ("arguments", "parameters")
_BLANK = " \t\r\n"


class JsonCall:
    """Arguments are passed on as they are written, piece by piece, once the name is known.

    With `names`, an object that names another function is no call.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self._names = names
        self._state = "open"
        self._key = ""
        self._value: list[str] = []  # characters of the key or value that is being read
        self._nesting = Nesting("{")  # of the key or value
        self._arguments: str | None = None  # complete, but the name is not known yet
        self._sent = False

    def feed(self, text: str, out: list[Event]) -> str:
        for at, char in enumerate(text):
            self._take(char, out)
            if self.done or self.failed:
                return text[at + self.done :]
        self._stream(out)
        return ""

    def _take(self, char: str, out: list[Event]) -> None:
        state = self._state
        if state in ("key", "string", "container"):
            self._value.append(char)
            if self._nesting.take(char):
                return
            if state == "key":
                self._key, self._value = _decoded("".join(self._value)), []
                self._state = "colon"
            else:
                self._complete(out)
                self._state = "next"
        elif state == "scalar" and char not in ",}" + _BLANK:
            self._value.append(char)
        elif state == "scalar":
            self._complete(out)
            self._state = "next"
            self._take(char, out)
        elif char in _BLANK:
            return
        elif state == "open" and char == "{":
            self._state = "first"
        elif state in ("first", "again") and char == '"':
            self._begin("key", char)
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state == "value":
            kind = "string" if char == '"' else "container" if char in "{[" else "scalar"
            self._begin(kind, char)
        elif state == "next" and char == ",":
            self._state = "again"
        elif state in ("first", "next") and char == "}":
            self._end(out)
        else:
            self.failed = True

    def _begin(self, state: str, char: str) -> None:
        self._state, self._value = state, [char]
        self._nesting = Nesting(char)

    def _stream(self, out: list[Event]) -> None:
        """Pass on what there is of the arguments."""
        if (
            self._state == "container"
            and self.started
            and self._value
            and self._key in _ARGUMENTS
            and self._arguments is None
        ):
            out.append(Event("arguments", "".join(self._value)))
            self._value, self._sent = [], True

    def _complete(self, out: list[Event]) -> None:
        value, self._value = "".join(self._value), []
        if self._key in _NAME and not self.started:
            name = _decoded(value)
            if not name or (self._names is not None and name not in self._names):
                self.failed = True
                return
            self.started = True
            out.append(Event("call", name))
            if self._arguments is not None:
                out.append(Event("arguments", self._arguments))
                self._sent = True
        elif self._key in _ARGUMENTS and self._arguments is None:
            if self._sent:
                out.append(Event("arguments", value))
                self._arguments = ""
                return
            self._arguments = _as_object(value)
            if self.started:
                out.append(Event("arguments", self._arguments))
                self._sent = True

    def _end(self, out: list[Event]) -> None:
        if not self.started:
            self.failed = True
            return
        self.done = True
        if not self._sent:
            out.append(Event("arguments", "{}"))


def _decoded(text: str) -> str:
    """The string of a JSON literal; "" for what is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _as_object(text: str) -> str:
    """Arguments as a JSON object's text: null has none, and some models quote the object."""
    if text == "null":
        return "{}"
    inner = _decoded(text)
    return inner if inner.lstrip().startswith("{") else text


class JsonCalls:
    """A JSON list of such objects."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self._names = names
        self._call: JsonCall | None = None
        self._state = "open"

    def feed(self, text: str, out: list[Event]) -> str:
        while text and not (self.done or self.failed):
            if self._call is not None:
                text = self._call.feed(text, out)
                self.started |= self._call.started
                self.failed = self._call.failed
                if self._call.done:
                    self._call, self._state = None, "next"
                continue
            char = text[0]
            if self._state in ("first", "again") and char == "{":
                self._call = JsonCall(self._names)
                continue
            if self._state == "open" and char == "[":
                self._state = "first"
            elif self._state == "next" and char == ",":
                self._state = "again"
            elif self._state in ("first", "next") and char == "]":
                self.done = True
            elif char not in _BLANK:
                self.failed = True
                return text
            text = text[1:]
        return text
