"""Answers that are calls from their first character on, or none at all."""

from __future__ import annotations

from collections.abc import Callable

from jaxengine.frontend.tools.base import CallParser, Content, Event, feed_call


class LeadingCalls:
    """If the answer begins (after blanks, or after `tag`) with `first`, what `reader` makes reads
    it; calls may follow each other, with `between` and blanks in between. All else is content, but
    for what follows a call that breaks off after its name."""

    def __init__(
        self,
        first: str,
        reader: Callable[[], CallParser],
        tag: str = "",
        between: str = "",
    ) -> None:
        self._first = first
        self._reader = reader
        self._tag = tag
        self._between = between
        self._content = Content()
        self._buffer = ""
        self._raw = ""
        self._call: CallParser | None = None
        self._plain = False
        self._lost = False
        self._any = False  # a call was read to its end

    def feed(self, text: str) -> list[Event]:
        out: list[Event] = []
        self._buffer += "" if self._lost else text
        while self._buffer and not self._plain and self._step(out):
            continue
        if self._plain:
            self._content.push(self._buffer, out)
            self._buffer = ""
        return out

    def finish(self) -> list[Event]:
        out: list[Event] = []
        if self._call is None or not self._call.started:
            rest = self._raw + self._buffer
            self._content.push(rest.lstrip(_blank(self._between)) if self._any else rest, out)
        self._content.finish(out)
        self._buffer = self._raw = ""
        return out

    def _step(self, out: list[Event]) -> bool:
        if self._call is None:
            skipped = self._buffer.lstrip(_blank(self._between) if self._any else None)
            if not skipped or (len(skipped) < len(self._tag) and self._tag.startswith(skipped)):
                return False
            if self._tag and skipped.startswith(self._tag):
                skipped = skipped[len(self._tag) :].lstrip()
                if not skipped:
                    return False
            if skipped[0] != self._first:
                self._plain = True
                if self._any:
                    self._buffer = skipped
                return False
            self._call = self._reader()
            lead = len(self._buffer) - len(skipped)
            self._raw, self._buffer = self._buffer[:lead], skipped
        if not self._buffer:
            return False
        self._raw, self._buffer = feed_call(self._call, self._content, self._raw, self._buffer, out)
        if self._call.failed and not self._call.started:
            self._plain = True
            self._buffer, self._raw = self._raw, ""
            return False
        if self._call.failed:  # broken off: what follows cannot be told apart
            self._lost, self._buffer = True, ""
        elif self._call.done:
            self._call, self._any = None, True
        return not self._lost


def _blank(between: str) -> str:
    return " \t\r\n" + between
