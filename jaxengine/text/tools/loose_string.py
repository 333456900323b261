"""The inside of a string as models write it, as the inside of a JSON string."""

from __future__ import annotations

import functools
import json
import re
import unicodedata

_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_HEX = frozenset("0123456789abcdefABCDEF")
# Python's, beside those that JSON has too
_PYTHON = {"a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "\n": ""}
_ESCAPED = frozenset('"\\/bfnrt')
CLOSER = re.compile(r"\s{0,64}[}\])]")
# brackets and blanks at the end of a JSON string's inside
_TAIL = re.compile(r"(?:(?<!\\)\\[nrt]|[ }\])])*\Z")
_LONGEST_TAIL = 64


@functools.cache
def _plain(stops: str) -> re.Pattern[str]:
    return re.compile(f"[^\\\\\x00-\x1f{re.escape(stops)}]+")


class LooseString:
    """`take` reads on to the next quote or mark that may end the string; who calls it decides, and
    gives the character back with `keep` if it is part of the text.

    `doubt`: the string may have ended there already; nothing goes out from then on until it is
    known.
    """

    def __init__(self, quote: str, first: str, python: bool, raw: bool, stream: bool) -> None:
        self.quote = quote
        self.stream = stream
        self.stopped = ""  # at what `take` stopped: "quote", "mark", or "" at the text's end
        self.doubt: int | None = None  # so many of the parts were before it
        self.was_cut = False
        self._first = first
        self._python = python
        self._raw = raw
        self._parts: list[str] = []
        self._behind: list[str] = []  # the text as written since the doubt began
        self._skip_behind = 0
        self._regex = _plain(quote[0] + '"' + first)

    def take(self, text: str, at: int, final: bool) -> int:
        """Read on; returns up to where."""
        self.stopped = ""
        while at < len(text):
            match = self._regex.match(text, at)
            if match is not None:
                self.keep(match[0], match[0])
                at = match.end()
                continue
            char = text[at]
            if char == self.quote[0]:
                if len(self.quote) == 1 or text.startswith(self.quote, at):
                    self.stopped = "quote"
                    return at
                if len(text) - at < len(self.quote) and not final:
                    if self.quote.startswith(text[at:]):
                        self.stopped = "wait"
                        return at
                self.keep('\\"' if char == '"' else char, char)
                at += 1
            elif char == "\\":
                size = self._escape(text, at, final)
                if not size:
                    self.stopped = "wait"
                    return at
                at += size
            elif char in self._first:
                self.stopped = "mark"
                return at
            else:
                self.keep(_CONTROLS.get(char) or _shown(char), char)
                at += 1
        return at

    def keep(self, shown: str, written: str) -> None:
        """Text of the string: as in JSON, and as it was written."""
        self._parts.append('\\"' if shown == '"' else shown)
        if self.doubt is not None:
            self._behind.append(written)

    def begin_doubt(self, skip: int) -> None:
        """It may end here; so many characters from here on are its quote."""
        if self.doubt is None:
            self.doubt = len(self._parts)
            self._skip_behind = skip

    def cut(self) -> str:
        """End it where the doubt began; returns what stands behind."""
        behind = "".join(self._behind)[self._skip_behind :]
        del self._parts[self.doubt :]
        self.was_cut = self._skip_behind == 0
        self.doubt = None
        self._behind = []
        return behind

    def ready(self) -> str:
        """What can go out. Closing brackets at the end wait: the closing quote may be missing."""
        if self.doubt is not None or not self._parts:
            return ""
        text = "".join(self._parts)
        start = max(0, len(text) - _LONGEST_TAIL)
        tail = _TAIL.search(text, start)
        keep = tail.start() if tail is not None else len(text)
        self._parts = [text[keep:]] if keep < len(text) else []
        return text[:keep]

    def end(self) -> str:
        """What is left to go out."""
        text, self._parts = "".join(self._parts), []
        return text

    def _escape(self, text: str, at: int, final: bool) -> int:
        """Read what begins with a backslash; returns its length, 0 when more text is needed."""
        if self._raw:
            if at + 1 == len(text) and not final:
                return 0
            self.keep("\\\\", "\\")
            if text[at + 1 : at + 2] == self.quote[0]:  # Python's raw strings keep both
                self.keep('\\"' if self.quote[0] == '"' else self.quote[0], self.quote[0])
                return 2
            return 1
        if at + 1 == len(text):
            return 1 if final else 0  # cut off: dropped
        char = text[at + 1]
        if char in _ESCAPED and not (self._python and char == "/"):
            self.keep(text[at : at + 2], text[at : at + 2])
        elif char in "'`“”‘’":
            self.keep(char, text[at : at + 2])
        elif char == "u":
            return self._unicode(text, at, final)
        elif self._python and char in "xUN":
            return self._python_code(text, at, final)
        elif self._python and char in _PYTHON:
            self.keep(_PYTHON[char], text[at : at + 2])
        else:  # a stray backslash
            self.keep("\\\\", "\\")
            return 1
        return 2

    def _unicode(self, text: str, at: int, final: bool) -> int:
        digits = text[at + 2 : at + 6]
        if len(digits) < 4 and not final and _HEX.issuperset(digits):
            return 0
        if len(digits) < 4 or not _HEX.issuperset(digits):
            if final and _HEX.issuperset(digits) and at + 2 + len(digits) == len(text):
                return len(text) - at  # cut off: dropped
            self.keep("\\\\", "\\")
            return 1
        code = int(digits, 16)
        size = 6
        if 0xD800 <= code < 0xDC00:  # half of a pair
            other = text[at + 6 : at + 12]
            if re.fullmatch(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", other):
                size = 12
            elif len(other) < 6 and not final and _may_be_low(other):
                return 0
        half = 0xD800 <= code < 0xE000 and size == 6
        self.keep("\\ufffd" if half else text[at : at + size], text[at : at + size])
        return size

    def _python_code(self, text: str, at: int, final: bool) -> int:
        kind = text[at + 1]
        if kind == "N":
            match = re.compile(r"\\N\{([^{}\n]{1,80})\}").match(text, at)
            if match is None and not final and len(text) - at < 88:
                return 0
            char = _named(match[1]) if match is not None else None
            if match is None or char is None:
                self.keep("\\\\", "\\")
                return 1
            self.keep(_shown(char), match[0])
            return len(match[0])
        size = 2 if kind == "x" else 8
        digits = text[at + 2 : at + 2 + size]
        if len(digits) < size and not final and _HEX.issuperset(digits):
            return 0
        code = int(digits, 16) if len(digits) == size and _HEX.issuperset(digits) else -1
        if not 0 <= code < 0x110000 or 0xD800 <= code < 0xE000:
            self.keep("\\\\", "\\")
            return 1
        self.keep(_shown(chr(code)), text[at : at + 2 + size])
        return 2 + size


def decoded(literal: str) -> str:
    """The text of a JSON string."""
    value = json.loads(literal) if literal else ""
    return value if isinstance(value, str) else ""


def trailing_closers(text: str, closers: str) -> str:
    """The inside of a JSON string that was cut off, without the brackets that close what is open
    around it, if they stand at its end."""
    tail = _TAIL.search(text, max(0, len(text) - _LONGEST_TAIL))
    if tail is None or not closers:
        return text
    found = "".join(c for c in re.sub(r"\\[nrt]", "", tail[0]) if c in "}])")
    return text[: tail.start()] if found == closers else text


def _shown(char: str) -> str:
    return json.dumps(char, ensure_ascii=False)[1:-1]


def _named(name: str) -> str | None:
    try:
        return unicodedata.lookup(name)
    except KeyError:
        return None


def _may_be_low(text: str) -> bool:
    full = "\\udc00"
    return all(
        (a == b) if i < 2 else (a in "dD" if i == 2 else a in _HEX)
        for i, (a, b) in enumerate(zip(text, full, strict=False))
    )
