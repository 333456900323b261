"""Reasoning between <think> and </think>, before the answer."""

from __future__ import annotations

from typing import Literal

from jaxengine.frontend.tools.base import Event, Parser, held

BEGIN, END = "<think>", "</think>"
Start = Literal["inside", "maybe", "outside"]


class Think:
    """What follows the reasoning goes to `rest`. Blanks around the tags are left out.

    `start`: the reasoning has begun already ("inside"; another <think> is passed over), begins
    with a tag or not at all ("maybe"), or is over ("outside").
    """

    def __init__(self, start: Start, rest: Parser) -> None:
        self._state: str = start
        self._opening = start == "inside"  # nothing of the reasoning was seen yet
        self._tagged = False
        self._rest = rest
        self._buffer = ""

    def feed(self, text: str) -> list[Event]:
        if self._state == "outside":
            return self._rest.feed(text)
        self._buffer += text
        out: list[Event] = []
        while self._state != "outside" and self._step(out):
            continue
        if self._state == "outside" and self._buffer:
            text, self._buffer = self._buffer, ""
            out += self._rest.feed(text)
        return out

    def finish(self) -> list[Event]:
        out: list[Event] = []
        text, self._buffer = self._buffer, ""
        if self._state == "inside":
            if text.strip():
                out.append(Event("reasoning", text.rstrip()))
        elif self._state in ("maybe", "outside"):
            out += self._rest.feed(text)
        return out + self._rest.finish()

    def _step(self, out: list[Event]) -> bool:
        if self._state == "maybe":
            return self._begin()
        if self._state == "after":
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer:
                self._state = "outside"
            return False
        return self._open() if self._opening else self._inside(out)

    def _open(self) -> bool:
        """Pass over blanks, and over one tag."""
        self._buffer = self._buffer.lstrip()
        if not self._tagged and self._buffer.startswith(BEGIN):
            self._buffer, self._tagged = self._buffer[len(BEGIN) :], True
            return True
        if not self._buffer or (not self._tagged and BEGIN.startswith(self._buffer)):
            return False
        self._opening = False
        return True

    def _begin(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(BEGIN):
            self._buffer, self._state, self._opening = text, "inside", True
            return True
        if not BEGIN.startswith(text):
            self._state = "outside"
        return False

    def _inside(self, out: list[Event]) -> bool:
        at = self._buffer.find(END)
        ended = at >= 0
        if not ended:
            at = len(self._buffer) - held(self._buffer, (END,))
        kept = self._buffer[:at].rstrip()
        if kept:
            out.append(Event("reasoning", kept))
        self._buffer = self._buffer[at + len(END) if ended else len(kept) :]
        if ended:
            self._state = "after"
        return ended
