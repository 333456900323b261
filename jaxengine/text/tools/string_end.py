"""Whether a quote ends its string or belongs to it, told by what follows: models forget to escape
quotes inside of strings. The end of a string in valid JSON is always taken for one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxengine.text.tools.marks import Marks

WINDOW = 256  # characters that a decision may wait for
WORD_KEY = re.compile(r"(?:[^\W\d]|\$)[\w$\-]{0,63}\s{0,16}(?:[:=]|\Z)")
QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "`": "`"}
_CLOSERS = "}])"
_LITERALS = ("true", "false", "null", "True", "False", "None")


@dataclass
class StringEnd:
    """`kind` of bracket that the string is in, "" if that is outside of the value; `outside` is the
    last bracket there. `depth`: how many are open. `final`: no more text comes."""

    text: str
    final: bool
    kind: str
    outside: str
    depth: int
    marks: Marks

    def ends(self, at: int) -> bool | None:
        """For a quote before `at`; None when more text is needed."""
        top = self.kind or self.outside
        if not top:
            return True
        limit = at + WINDOW
        found = self._blank(at, limit)
        if found is None:
            return True if self.final else None
        if found >= limit:
            return True
        char = self.text[found]
        mark = self._mark(found)
        if mark is not False:
            return mark
        if char == ",":
            return self._continues(found + 1, top, limit)
        if char in _CLOSERS:
            return self._closes(found, limit)
        if char in QUOTES and found > at and top == "{":
            return self._is_key(found, limit)
        if char == "/" and found > at:
            two = self.text[found : found + 2]
            return None if len(two) < 2 and not self.final else two in ("//", "/*")
        return False

    def _mark(self, at: int) -> bool | None:
        if self.text[at] not in self.marks.first:
            return False
        mark = self.marks.at(self.text, at, self.final)
        return None if mark is None else bool(mark)

    def _blank(self, at: int, limit: int) -> int | None:
        """The next place that is not blank; None when the text ends before."""
        text = self.text
        while at < len(text) and at < limit and text[at].isspace():
            at += 1
        return at if at < len(text) else None

    def _continues(self, at: int, top: str, limit: int) -> bool | None:
        """Whether a comma before `at` can stand between members."""
        found = self._blank(at, limit)
        if found is None:
            return True if self.final else None
        if found >= limit:
            return True
        char = self.text[found]
        mark = self._mark(found)
        if mark is not False:
            return mark
        if char in _CLOSERS or char in ",/#":
            return True
        argument = top == "(" and not self.kind
        if top == "{" and char in QUOTES:
            return self._is_key(found, limit)
        if top != "{" and (char in QUOTES or char in "{[(-+." or char.isdecimal()):
            return True
        if top == "{" or argument:
            match = WORD_KEY.match(self.text, found)
            if match is None:
                return False
            if match[0].endswith((":", "=")):
                return True
            return self.final if self.final or len(match[0]) >= 64 else None
        for literal in _LITERALS:
            if self.text.startswith(literal, found):
                return True
            if not self.final and literal.startswith(self.text[found : found + 8]):
                return None
        return False

    def _is_key(self, at: int, limit: int) -> bool | None:
        """Whether the quote at `at` begins the name of a member."""
        text, quote = self.text, QUOTES[self.text[at]]
        at += 1
        while at < len(text) and at < limit and text[at] != quote:
            if text[at] == "\n":
                return False
            at += 2 if text[at] == "\\" else 1
        if at >= limit:
            return True
        if at >= len(text):
            return True if self.final else None
        found = self._blank(at + 1, limit)
        if found is None:
            return True if self.final else None
        return found >= limit or text[found] == ":"

    def _closes(self, at: int, limit: int) -> bool | None:
        """Whether the closing brackets at `at` are followed by what may follow them."""
        text, count = self.text, 0
        while at < len(text) and at < limit and count < self.depth:
            if not text[at].isspace() and text[at] not in _CLOSERS:
                break
            count += text[at] in _CLOSERS
            at += 1
        if at >= limit:
            return True
        if at == len(text):
            return True if self.final else None
        char = text[at]
        if count == self.depth:  # the call is over; a quote right here is one inside of the string
            return char not in "\"'”’"
        mark = self._mark(at)
        if mark is not False:
            return mark
        return char in ",/{"  # an object that is written twice is closed too
