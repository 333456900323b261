"""gpt-oss's messages, cut where their kind changes; for the forms see `harmony`."""

from __future__ import annotations

import re
from copy import copy
from typing import Literal, NamedTuple

from jaxengine.text.tools.base import first_of, held, pieces
from jaxengine.text.tools.nesting import Nesting
from jaxengine.text.tools.schema import Tools

MESSAGE, CHANNEL, START = "<|message|>", "<|channel|>", "<|start|>"
_CLOSE = ("<|end|>", "<|call|>", "<|return|>")
_ENDS = (*_CLOSE, START, CHANNEL)
_CHANNELS = ("analysis", "commentary", "final")
_NAMED = re.compile("|".join(_CHANNELS))
_TO = re.compile(r"\bto\s*=\s*[\"']?([\w.\-:/]+)")
_BARE_TO = re.compile(r"(?<!<\|start\|>)\bfunctions\.([\w.\-:/]+)")
# the words of a header, in their order
_WORDS = (("assistant",), _CHANNELS, ("to=",), ("json", "code"))
_RECIPIENT = re.compile(r"to\s*=\s*[^\s<{]*\s*")
# what a header is made of, beside free text
_HEADER_PARTS = re.compile(
    r"<\|start\|>\s*(?:assistant)?|<\|channel\|>\s*(?:analysis|commentary|final)?|"
    r"<\|constrain\|>\s*\w*|\bto\s*=\s*[\"']?[\w.\-:/]+[\"']?|<\|(?:\w*\|?)?\Z"
)
_LONGEST = 128  # characters of a header without marks
_LONGEST_HEADER = 1000

Kind = Literal["reasoning", "content", "arguments", "mark"]


class Piece(NamedTuple):
    kind: Kind
    text: str
    name: str = ""  # with a mark: the function that the text behind it is for


class Channels:
    """Pieces that make up the whole text. What is not certain yet is held back.

    A message is a call if its recipient is one of the `tools`, with or without "functions." before
    it, and whichever part of the header says so; outside of the commentary channel only if it
    begins with "{". Any other "functions.NAME" is a call too, other recipients' messages are
    reasoning. Text without a header is content; in a header without <|message|> it is reasoning.
    """

    def __init__(self, inside: bool, tools: Tools) -> None:
        self._tools = tools
        self._kind: Kind | None = "content" if inside else None  # None: in a header
        self._fresh = not inside  # nothing of the header has come yet
        self._name = ""  # of a function, if the message begins like arguments
        self._sure = True  # it is a call however it begins
        self._object = Nesting("")  # of the arguments so far
        # of those from here on, if a mark in a string is text; and how far that was looked at
        self._ahead: Nesting | None = None
        self._seen = 0
        self._opened = ""  # the mark that will be given out with that name
        self._buffer = ""
        self._final = False
        self._out: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        for piece in pieces(text):
            self._buffer += piece
            while self._step():
                continue
        return self._taken()

    def finish(self) -> list[Piece]:
        self._final = True
        while self._step():
            continue
        if self._name:
            self._open_call(self._sure)
        if self._buffer:
            if self._kind is None:
                self._free_text(len(self._buffer))
            else:
                self._give(self._kind, len(self._buffer))
        return self._taken()

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out

    def _give(self, kind: Kind, size: int, name: str = "") -> None:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if text or name:
            self._out.append(Piece(kind, text, name))

    def _step(self) -> bool:
        """Go on as far as one state does; False when more text is needed."""
        if self._name:
            return self._first_of_body()
        return self._header() if self._kind is None else self._body()

    def _header(self) -> bool:
        text = self._buffer[:_LONGEST_HEADER]
        if not text:
            return False
        if self._fresh and not self._may_be_header(text):
            self._kind, self._fresh = "content", False
            self._out.append(Piece("mark", ""))
            return True
        at, mark = first_of(text, (MESSAGE, *_CLOSE))
        start = text.find(START, len(START))
        brace = text.find("{")
        if start >= 0 and (0 <= at < start or not text[:start].strip()):
            start = -1
        end = start if start >= 0 else at if at >= 0 else len(text)
        if 0 <= brace < end and self._recipient(text[:brace]):
            self._begin(text[:brace], brace)  # the mark is missing
        elif start >= 0:
            self._free_text(start)
        elif at < 0 and len(text) < _LONGEST_HEADER:
            return False
        elif at < 0:  # the message has begun without its mark
            self._kind = self._free_text(len(text))
        elif mark != MESSAGE:
            self._free_text(at)
            self._give("mark", len(mark))
        else:
            self._begin(text[:at], at + len(mark))
        return True

    def _may_be_header(self, text: str) -> bool:
        """Whether the answer, or what follows a message, begins with a header."""
        seen = text[:_LONGEST]
        if "<|" not in seen and (len(text) > _LONGEST or (self._final and bool(text.strip()))):
            return False
        return _is_header(seen)

    def _recipient(self, header: str) -> str | None:
        """The function that a message is for; "" for another recipient, None without one."""
        found = _TO.findall(header)
        for name in found:
            tool = self._tools.find(name) or self._tools.find(name.rstrip(".:/-"))
            if tool is not None:
                return tool
        for name in found:
            if name.startswith("functions."):
                return str(name.removeprefix("functions."))
        if found:
            return ""
        bare = _BARE_TO.search(header)
        return self._tools.find(bare[1]) if bare is not None else None

    def _begin(self, header: str, size: int) -> None:
        """A message begins behind so many characters."""
        recipient = self._recipient(header)
        channels = _NAMED.findall(header)
        channel = channels[-1] if channels else ""
        self._fresh = False
        if recipient:
            self._name = recipient
            self._sure = channel not in ("analysis", "final")
            self._kind = "content" if channel == "final" else "reasoning"
            self._opened, self._buffer = self._buffer[:size], self._buffer[size:]
            return
        reasoning = channel == "analysis" or (recipient is not None and channel != "final")
        self._kind = "reasoning" if reasoning else "content"
        self._give("mark", size)

    def _first_of_body(self) -> bool:
        text = self._buffer.lstrip()
        if self._sure or text:
            self._open_call(self._sure or text[0] == "{" or text.startswith(_CLOSE))
            return True
        return False

    def _open_call(self, is_call: bool) -> None:
        name, self._name = self._name, ""
        self._out.append(Piece("mark", self._opened, name if is_call else ""))
        if is_call:
            self._kind, self._object = "arguments", Nesting("")

    def _body(self) -> bool:
        assert self._kind is not None
        at, mark = first_of(self._buffer, _ENDS)
        ready = at if at >= 0 else len(self._buffer) - held(self._buffer, _ENDS)
        if self._kind == "arguments":
            for char in self._buffer[:ready]:
                self._object.take(char)
            if at >= 0 and self._object.in_string:
                self._give(self._kind, at)
                return self._mark_in_string(mark)
        self._give(self._kind, ready)
        if at < 0:
            return False
        return self._end_body(mark)

    def _mark_in_string(self, mark: str) -> bool:
        """A mark in an open string of arguments is text if that string is closed and the next
        header does not come before."""
        text = self._buffer
        if self._ahead is None:
            self._ahead, self._seen = copy(self._object), 0
        start = text.find(MESSAGE, max(0, self._seen - len(MESSAGE)))
        end = len(text) if start < 0 else start
        for at in range(self._seen, end):
            if not self._ahead.take(text[at]):
                self._object, self._ahead = self._ahead, None
                self._give("arguments", at + 1)
                return True
        self._seen = end
        if start < 0 and not self._final:
            return False
        self._ahead = None
        return self._end_body(mark)

    def _end_body(self, mark: str) -> bool:
        if mark in _CLOSE:
            self._give("mark", len(mark))
        else:  # it opens the next header
            self._out.append(Piece("mark", ""))
        self._kind, self._fresh = None, True
        return True

    def _free_text(self, size: int) -> Kind:
        """Of a header that leads to no message, whatever is not a part of headers; returns its
        kind."""
        header = self._buffer[:size]
        text = _HEADER_PARTS.sub("", header).strip()
        kind: Kind = "content" if _NAMED.findall(header)[-1:] == ["final"] else "reasoning"
        if not text or (self._final and _is_header(text)):
            self._give("mark", size)
        else:
            at = 0
            for match in _HEADER_PARTS.finditer(header):
                between = header[at : match.start()]
                self._give(kind if between.strip() else "mark", len(between))
                self._give("mark", len(match[0]))
                at = match.end()
            self._give(kind if header[at:].strip() else "mark", size - at)
        self._fresh = True
        return kind


def _is_header(text: str) -> bool:
    """Whether it is a header or the beginning of one, perhaps without its first mark."""
    rest = text.lstrip()
    for at, words in enumerate(_WORDS):
        if not rest or rest == "<" or rest.startswith("<|"):
            return True
        if any(word.startswith(rest) for later in _WORDS[at:] for word in later):
            return True
        match = _RECIPIENT.match(rest) if words == ("to=",) else None
        if match is not None:
            rest = rest[match.end() :]
        elif re.fullmatch(r"to\s*", rest):
            return True
        for word in words:
            if rest.startswith(word):
                rest = rest[len(word) :].lstrip()
                break
    return not rest or rest == "<" or rest.startswith("<|")
