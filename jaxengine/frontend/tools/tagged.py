"""Calls that stand between tags (or behind one) in the text: hermes and its like."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxengine.frontend.tools.base import CallParser, Content, Event, feed_call, first_of, held

# The text of a call begins with this character: what reads it, or None if it is no call.
Reader = Callable[[str], CallParser | None]


_LOOSE = " \t\r\n}]"  # between a call and its closing tag: models close a brace too many


class TaggedCalls:
    """Text, with calls behind any of `begins`, closed by `end` (or not, which models forget). A
    tag in `bare` is part of the call itself. What turns out to be no call is content, tag
    included; a call that breaks off after its name loses the rest up to the next tag."""

    def __init__(
        self, begins: Sequence[str], end: str, reader: Reader, bare: Sequence[str] = ()
    ) -> None:
        self._begins = (*begins, *bare)
        self._end = end
        self._reader = reader
        self._bare = bare
        self._content = Content()
        self._buffer = ""
        self._state = "text"
        self._call: CallParser | None = None
        self._raw = ""  # of the call, while it may still turn out to be none

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        out: list[Event] = []
        while self._step(out):
            continue
        return out

    def finish(self) -> list[Event]:
        out: list[Event] = []
        if self._state == "text":
            self._content.push(self._buffer, out)
        elif self._state == "call" and not (self._call is not None and self._call.started):
            self._content.push(self._raw + self._buffer, out)
        self._content.finish(out)
        self._buffer = self._raw = ""
        return out

    def _step(self, out: list[Event]) -> bool:
        """Go on as far as one state does; False when more text is needed."""
        if self._state == "text":
            return self._text(out)
        if self._state == "after":
            return self._after()
        if self._state == "broken":
            return self._broken()
        return self._in_call(out)

    def _text(self, out: list[Event]) -> bool:
        at, marker = first_of(self._buffer, self._begins)
        if at < 0:
            ready = len(self._buffer) - held(self._buffer, self._begins)
            self._content.push(self._buffer[:ready], out)
            self._buffer = self._buffer[ready:]
            return False
        self._content.push(self._buffer[:at], out)
        if marker in self._bare:
            self._raw, self._buffer = "", self._buffer[at:]
        else:
            self._raw, self._buffer = marker, self._buffer[at + len(marker) :]
        self._state, self._call = "call", None
        return True

    def _in_call(self, out: list[Event]) -> bool:
        if self._call is None:
            bare = self._buffer.lstrip()
            if not bare:
                return False
            self._call = self._reader(bare[0])
            if self._call is None:
                self._raw += self._buffer
                return self._no_call(out)
        if not self._buffer:
            return False
        self._raw, self._buffer = feed_call(self._call, self._content, self._raw, self._buffer, out)
        if self._call.failed and not self._call.started:
            return self._no_call(out)
        if self._call.done or self._call.failed:
            self._state = "after" if self._call.done else "broken"
        return True

    def _no_call(self, out: list[Event]) -> bool:
        # the first character cannot begin a call's tag again, or this would not end
        text = self._raw
        self._content.push(text[:1], out)
        self._raw, self._buffer, self._state = "", text[1:], "text"
        self._call = None
        return True

    def _after(self) -> bool:
        self._buffer = self._buffer.lstrip(_LOOSE)
        if self._buffer.startswith(self._end):
            self._buffer = self._buffer[len(self._end) :]
        elif self._end.startswith(self._buffer):
            return False
        self._state = "text"
        return True

    def _broken(self) -> bool:
        tags = (self._end, *self._begins)
        at, marker = first_of(self._buffer, tags)
        if at < 0:
            self._buffer = self._buffer[len(self._buffer) - held(self._buffer, tags) :]
            return False
        self._buffer = self._buffer[at + (len(marker) if marker == self._end else 0) :]
        self._state = "text"
        return True
