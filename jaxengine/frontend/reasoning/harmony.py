"""gpt-oss: messages with a header that names their channel or the function they go to.

<|channel|>analysis<|message|>...<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with <|start|>assistant, so that an answer begins inside a header.
"""

from __future__ import annotations

import re

from jaxengine.frontend.tools.base import Event, Kind, first_of, held

MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_BEGINS = ("<|channel|>", "<|start|>", "<|constrain|>", "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([\w.\-:/]+)")
FINAL = "<|channel|>final<|message|>"  # begins an answer without reasoning


class Harmony:
    """`inside`: the prompt has the header of the final message already."""

    def __init__(self, inside: bool = False) -> None:
        self._kind: Kind | None = "content" if inside else None  # None: in a header
        self._first = not inside  # the answer has just begun
        self._buffer = ""
        self._empty = True  # nothing of this message was passed on
        self._seen: set[Kind] = set()

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        out: list[Event] = []
        while self._header(out) if self._kind is None else self._body(out):
            continue
        return out

    def finish(self) -> list[Event]:
        out: list[Event] = []
        text, self._buffer = self._buffer, ""
        if self._kind is not None:
            self._pass_on(text, out)
        elif self._first and not text.lstrip().startswith(_BEGINS):
            self._kind = "content"
            self._pass_on(text, out)
        return out

    def _header(self, out: list[Event]) -> bool:
        if self._first and not _may_be_header(self._buffer):
            self._kind, self._first = "content", False
            return True
        header, mark, rest = self._buffer.partition(MESSAGE)
        if not mark:
            return False
        self._buffer, self._first = rest, False
        to = _TO.search(header)
        channels = _CHANNEL.findall(header)
        if to is not None and to[1].startswith("functions."):
            self._kind = "arguments"
            out.append(Event("call", to[1].removeprefix("functions.")))
        elif to is not None or (channels and channels[-1] == "analysis"):
            self._kind = "reasoning"
        else:
            self._kind = "content"
        self._empty = True
        return True

    def _body(self, out: list[Event]) -> bool:
        at, mark = first_of(self._buffer, _ENDS)
        if at < 0:
            ready = len(self._buffer) - held(self._buffer, _ENDS)
            self._pass_on(self._buffer[:ready], out)
            self._buffer = self._buffer[ready:]
            return False
        self._pass_on(self._buffer[:at], out)
        if self._kind == "arguments" and self._empty:
            out.append(Event("arguments", "{}"))
        # what opens the next header is part of it
        self._buffer = self._buffer[at if mark in _ENDS[3:] else at + len(mark) :]
        self._kind = None
        return True

    def _pass_on(self, text: str, out: list[Event]) -> None:
        kind = self._kind
        if not text or kind is None:
            return
        if kind != "arguments" and self._empty and kind in self._seen:
            text = "\n" + text  # messages of one kind become one text
        self._empty = False
        self._seen.add(kind)
        out.append(Event(kind, text))


def _may_be_header(text: str) -> bool:
    text = text.lstrip()
    return any(text.startswith(b) or b.startswith(text) for b in _BEGINS)
