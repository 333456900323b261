"""What parsers of answers have in common: the events, and the text beside calls.

A parser is fed the answer's text in pieces, as they come; whole answers take the same way. What it
gives does not depend on where the pieces are cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

PIECE = 1024

Kind = Literal["reasoning", "content", "call", "arguments"]


class Event(NamedTuple):
    """`text` is new text of its kind. "call" begins a call of the function with that name;
    "arguments" are pieces of the JSON text for the latest call."""

    kind: Kind
    text: str


class Parser(Protocol):
    """Not shared: one for each answer."""

    def feed(self, text: str) -> list[Event]:
        """The events that are certain with this much more text."""
        ...

    def finish(self) -> list[Event]:
        """The text has ended: what was held back."""
        ...


class CallParser(Protocol):
    """Reads one call (or a list of them) out of text."""

    started: bool  # a "call" event was given; before, all may still turn out to be plain text
    done: bool
    failed: bool  # it is no call
    broken: bool  # done, but something else stands where it should go on

    def feed(self, text: str, out: list[Event]) -> str:
        """Append events. Returns the text behind the call, once it is done, or from where it
        cannot be one."""
        ...

    def finish(self, out: list[Event]) -> str:
        """The text has ended: a call that was started is closed, so that its arguments are JSON.
        Returns text that turned out to stand behind it."""
        ...


def pieces(text: str) -> list[str]:
    """Text in pieces of a size that is quick to cut up further."""
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


def held(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


def first_of(text: str, markers: Iterable[str], start: int = 0) -> tuple[int, str]:
    """Position of the first marker from `start` on, and the marker; (-1, "") without one."""
    found = [(at, m) for m in markers if (at := text.find(m, start)) >= 0]
    return min(found, key=lambda f: (f[0], -len(f[1])), default=(-1, ""))


class Content:
    """The text beside calls. Blanks next to a call belong to it and are left out."""

    def __init__(self) -> None:
        self.last = ""  # the latest character that is not blank
        self._blanks = ""
        self._after_call = False

    def push(self, text: str, out: list[Event]) -> None:
        text = self._blanks + text
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            self._after_call = False
            self.last = kept[-1]
            out.append(Event("content", kept))

    def call(self) -> None:
        """A call stands here."""
        self.last = self._blanks = ""
        self._after_call = True

    def finish(self, out: list[Event]) -> None:
        if self._blanks and not self._after_call:
            out.append(Event("content", self._blanks))
        self._blanks = ""


class Plain:
    """Everything is content."""

    def feed(self, text: str) -> list[Event]:
        return [Event("content", text)] if text else []

    def finish(self) -> list[Event]:
        return []
