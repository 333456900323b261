"""Calls in the text of an answer, wherever they stand: what all formats have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxengine.text.tools.base import CallParser, Content, Event, first_of, held, pieces
from jaxengine.text.tools.nesting import Nesting

_LOOSE = " \t\r\n}]"  # between a call and its closing tag: models close a bracket too many
FENCE = "```"
_OPEN_FENCE = re.compile(r"```\w{0,20}(?=\W)")
_LONGEST_HEAD = 400  # characters of tags, fences and blanks before a call
_MAX_CUTS = 16  # calls of an answer that may be found at its end to have ended earlier


class Where(NamedTuple):
    """A place where a call may begin."""

    tagged: bool = False  # behind a tag that only calls have
    first: bool = False  # nothing but blanks is before it
    thoughts: bool = False  # the model's thoughts are not closed: it must be unmistakable


@dataclass(frozen=True)
class Format:
    """How a model writes calls."""

    tags: tuple[str, ...]  # before a call, and no part of it
    bare: tuple[str, ...]  # that a call itself may begin with
    ends: tuple[str, ...]  # behind a call
    # of the text that begins with this character: what reads it, None if it cannot be a call
    reader: Callable[[str, Where], CallParser | None]
    between: str = ""  # characters between calls that are no text
    silent: bool = False  # a tag is no text even where no call follows
    # what begins a call without a tag if it is the last thing of thoughts that are not closed
    last: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Where a call may begin."""
        return (*self.tags, *self.bare, FENCE)


class Candidate:
    """Text from a mark on, which may be a call. Tags may be doubled, and a code block may open
    before or behind them."""

    def __init__(self, form: Format, where: Where) -> None:
        self.call: CallParser | None = None
        self.failed = False
        self.fenced = False
        self.tagged = False
        self._form = form
        self._where = where
        self._front = ""  # before the call itself
        self._at = 0  # so much of it was read
        self._raw: list[str] = []  # of the call, as long as it may be none

    @property
    def started(self) -> bool:
        return self.call is not None and self.call.started

    @property
    def done(self) -> bool:
        return self.call is not None and self.call.done

    @property
    def raw(self) -> str:
        """What was read, if it is no call."""
        return self._front + "".join(self._raw)

    def feed(self, text: str, out: list[Event]) -> str:
        """Returns the text behind the call once that is done, or from where it is none."""
        if self.call is None:
            self._front += text
            at = self._head()
            if at < 0:
                return ""
            text, self._front = self._front[at:], self._front[:at]
            self.call = self._form.reader(text[0], self._where._replace(tagged=self.tagged))
            if self.call is None:
                return self._fail("", text)
        rest = self.call.feed(text, out)
        if self.call.failed:  # what it waited with came in earlier pieces perhaps
            whole = "".join(self._raw) + text
            self._raw = []
            return self._fail(whole[: len(whole) - len(rest)], rest)
        if not self.call.started:
            self._raw.append(text)
        return rest

    def finish(self, out: list[Event]) -> str:
        rest = self.call.finish(out) if self.call is not None else ""
        self.failed = not self.started
        return rest

    def _fail(self, read: str, rest: str) -> str:
        self.failed = True
        if not (self._front or self._raw or read):  # not the same place again
            read, rest = rest[:1], rest[1:]
        self._raw.append(read)
        return rest

    def _head(self) -> int:
        """Where the call itself begins; -1 when that is not known yet."""
        text = self._front
        while self._at < len(text):
            tail = text[self._at : self._at + 64]
            tag = next((t for t in self._form.tags if tail.startswith(t)), "")
            fence = _OPEN_FENCE.match(tail) if not self.fenced or self.tagged else None
            if tail[0].isspace():
                self._at += 1
            elif tag:
                self.tagged = True
                self._at += len(tag)
            elif fence is not None:
                self.fenced = True
                self._at += fence.end()
            elif any(t.startswith(tail) for t in (*self._form.tags, FENCE)):
                return -1
            elif tail.startswith(FENCE) and re.fullmatch(r"```\w{0,20}", tail):
                return -1
            else:
                return self._at
            if self._at > _LONGEST_HEAD:
                return self._at if self._at < len(text) else -1
        return -1


class Calls:
    """Text with calls in it. What turns out to be no call is content, tags included (unless they
    are silent). What a call breaks off with is dropped up to the tag that closes it; without such
    a tag it is content."""

    def __init__(self, form: Format, thoughts: bool = False) -> None:
        self.form = form
        self._thoughts = thoughts
        self._marks = form.marks
        self._content = Content()
        self._buffer = ""
        self._state = "text"
        self._call = Candidate(form, Where())
        self._skipped = Nesting("{")
        self._any = False  # something stood there already
        self._loose = False  # brackets too many may follow
        self._scanned = 0  # so much of the buffer holds no closing tag

    def feed(self, text: str) -> list[Event]:
        out: list[Event] = []
        self._read(text, out)
        return out

    def finish(self) -> list[Event]:
        out: list[Event] = []
        cuts = 0
        while self._state == "call":
            rest = self._call.finish(out)
            if self._call.failed:
                self._no_call(out)
                break
            cuts += 1
            self._ended()
            if cuts > _MAX_CUTS:
                self._buffer = rest
                break
            self._read(rest, out)
        if self._state != "after" or cuts > _MAX_CUTS or len(self._buffer) < 2:
            self._push(self._buffer, out)  # else it is a closing tag that was cut off
        self._content.finish(out)
        self._buffer = ""
        return out

    def _read(self, text: str, out: list[Event]) -> None:
        for piece in pieces(text):
            self._buffer += piece
            while self._step(out):
                continue

    def _step(self, out: list[Event]) -> bool:
        """Go on as far as one state does; False when more text is needed."""
        if self._state == "text":
            return self._text(out)
        if self._state == "skip":
            return self._in_data(out)
        if self._state == "after":
            return self._after()
        if self._state == "broken":
            return self._broken()
        return self._in_call(out)

    def _push(self, text: str, out: list[Event]) -> None:
        self._any = self._any or not (text == "" or text.isspace())
        self._content.push(text, out)

    def _text(self, out: list[Event]) -> bool:
        at, mark = first_of(self._buffer, self._marks)
        if at < 0:
            ready = len(self._buffer) - held(self._buffer, self._marks)
            self._push(self._buffer[:ready], out)
            self._buffer = self._buffer[ready:]
            return False
        self._push(self._buffer[:at], out)
        self._buffer = self._buffer[at:]
        self._state = "call"
        self._call = Candidate(self.form, Where(False, not self._any, self._thoughts))
        return True

    def _in_call(self, out: list[Event]) -> bool:
        if not self._buffer:
            return False
        text, self._buffer = self._buffer, ""
        self._buffer = self._call.feed(text, out)
        if self._call.failed:
            self._no_call(out)
            return True
        if self._call.started:
            self._content.call()
            self._any = True
        if self._call.done:
            self._ended()
        return self._call.done

    def _ended(self) -> None:
        call = self._call.call
        broken = call is not None and call.broken and self._call.tagged and self.form.ends
        self._state = "broken" if broken else "after"
        self._scanned, self._loose = 0, True

    def _no_call(self, out: list[Event]) -> None:
        raw = self._call.raw
        self._state = "text"
        if raw.lstrip()[:1] in ("{", "[") and '"' in raw:
            # other JSON: what is inside of it is no call either
            self._skipped = Nesting(raw.lstrip()[0])
            if all(map(self._skipped.take, raw.lstrip()[1:])):
                self._state = "skip"
        if self.form.silent and self._call.tagged:
            quote = self._content.last
            mention = quote and quote in "`\"'" and self._buffer.startswith(quote)
            for tag in () if mention else self.form.tags:
                raw = raw.replace(tag, "")
        self._push(raw, out)

    def _in_data(self, out: list[Event]) -> bool:
        """Inside of JSON that is no call. A blank line ends it too: its brackets may be wrong."""
        stops = (*self.form.tags, "\n\n")
        end, stop = first_of(self._buffer, stops)
        if end < 0:
            end = len(self._buffer) - held(self._buffer, stops)
        for at in range(end):
            if not self._skipped.take(self._buffer[at]):
                end, stop = at + 1, "}"
                break
        self._push(self._buffer[:end], out)
        self._buffer = self._buffer[end:]
        if stop:
            self._state = "text"
        return bool(stop)

    def _after(self) -> bool:
        """Behind a call: closing tags, once or more."""
        while True:
            blank = (_LOOSE if self._loose else " \t\r\n") + self.form.between
            self._buffer = self._buffer.lstrip(blank)
            ends = (*self.form.ends, FENCE) if self._call.fenced else self.form.ends
            end = next((e for e in ends if self._buffer.startswith(e)), "")
            if not end:
                break
            self._buffer = self._buffer[len(end) :]
            self._loose = False
            self._call.fenced = self._call.fenced and end != FENCE
        if not self._buffer or any(e.startswith(self._buffer) for e in ends):
            return False
        self._state = "text"
        return True

    def _broken(self) -> bool:
        """Up to the closing tag; what stands there is text if another call comes before."""
        marks = (*self.form.ends, *self.form.tags)
        at, mark = first_of(self._buffer, marks, self._scanned)
        if at < 0:
            self._scanned = len(self._buffer) - held(self._buffer, marks)
            return False
        if mark in self.form.ends:
            self._buffer = self._buffer[at:]
            self._state = "after"
        else:
            self._state = "text"
        return True
