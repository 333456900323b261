"""JSON as models write it, given out as JSON that parses.

What is valid goes out as it is written, piece by piece. Repaired on the way: trailing and missing
commas, other quotes, names without quotes, Python's literals and strings, numbers in another
spelling, raw control characters, stray backslashes, quotes inside a string, comments, closing
brackets that are missing or too many. Scalars are made to fit their schema (`fit`).

Nothing that went out is taken back: of what may still change nothing goes out. One pass over the
text, without recursion; how far it looks ahead is bounded.
"""

from __future__ import annotations

import re

from jaxengine.text.tools.fit import fit_string, fit_word, quoted
from jaxengine.text.tools.json_writer import CLOSERS, JsonWriter
from jaxengine.text.tools.loose_string import CLOSER, LooseString, decoded, trailing_closers
from jaxengine.text.tools.marks import NO_MARKS, Marks
from jaxengine.text.tools.schema import ANY, Shape
from jaxengine.text.tools.string_end import QUOTES, WINDOW, WORD_KEY, StringEnd

_OPENER = {"}": "{", "]": "[", ")": "("}
_WORD = re.compile(r"[^\s:=,{}\[\]()\"'<]{1,256}")
_PREFIX = re.compile(r"[rRbBuUfF]{1,2}(?=[\"'])")  # of a Python string
_LITERALS = ("true", "false", "null", "True", "False", "None")
_MAX_CUTS = 8  # strings that may be found to have ended earlier


class LooseJson:
    """One value. `inside`: the brackets that are open around it, outermost first; what closes them
    ends it. So does a mark outside of strings. `python`: strings and brackets are Python's."""

    def __init__(
        self,
        shape: Shape = ANY,
        inside: str = "",
        marks: Marks = NO_MARKS,
        python: bool = False,
        level: int = 0,
    ) -> None:
        self.done = False
        self.rest = ""  # the text behind the value, once it is done
        self._inside = inside
        self._marks = marks
        self._first = marks.first
        self._python = python
        self._level = level  # of strings that this text is in
        self._text = ""
        self._at = 0
        self._final = False
        self._writer = JsonWriter(shape)
        self._state = "value"
        self._string: LooseString | None = None
        self._for_key = False
        self._word: list[str] = []
        self._comment = ""  # what ends it
        self._cuts = 0
        stops = re.escape(',}])\n\r"/#(' + "{[" * python + self._first)
        self._plain_word = re.compile(f"[^{stops}]+")
        self._nest = 0  # brackets open in a word

    def feed(self, text: str) -> str:
        """More text; returns more of the value."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._run()
        return self._given()

    def finish(self) -> str:
        """The text has ended. Returns the rest of the value; what is open is closed."""
        self._final = True
        self._run()
        while not self.done:
            string = self._string
            if string is None or string.doubt is None or self._cuts >= _MAX_CUTS:
                self._close_all()
                break
            # it ended where that first seemed possible
            self._cuts += 1
            self._text, self._at = string.cut() + self._text[self._at :], 0
            self._end_string()
            self._run()
        self.rest += self._text[self._at :]
        self._at = len(self._text)
        return self._given()

    def _given(self) -> str:
        if self._string is not None and not self.done:
            self._pass_string()
        return self._writer.taken()

    def _run(self) -> None:
        while not self.done and self._step():
            continue
        if self.done:
            self.rest, self._text, self._at = self._text[self._at :], "", 0

    def _step(self) -> bool:
        """Go on as far as one state does; False when more text is needed."""
        if self._comment:
            return self._in_comment()
        if self._string is not None:
            return self._in_string(self._string)
        if self._word:
            return self._in_word()
        if not self._skip():
            return False
        char = self._text[self._at]
        if char in self._first:
            mark = self._mark(self._at)
            if mark is None:
                return False
            if mark:
                self._close_all()
                return True
        if char == "/" or (char == "#" and self._state in ("key", "next")):
            two = self._text[self._at : self._at + 2]
            if len(two) < 2 and not self._final:
                return False
            if char == "#" or two in ("//", "/*"):
                self._comment = "*/" if two == "/*" else "\n"
                self._at += len(two)
                return True
        if self._state == "value":
            return self._value(char)
        if self._state == "key":
            return self._key(char)
        return self._colon(char) if self._state == "colon" else self._next(char)

    # between values

    def _skip(self) -> bool:
        """Pass over blanks; False when the text ends there."""
        text, start = self._text, self._at
        while self._at < len(text) and text[self._at].isspace():
            self._at += 1
        if self._at > start:
            self._writer.blank(text[start : self._at], self._state in ("colon", "value"))
        return self._at < len(text)

    def _in_comment(self) -> bool:
        end = self._text.find(self._comment, self._at)
        if end < 0:
            self._at = max(self._at, len(self._text) - 1)
            if self._final:
                self._at = len(self._text)
            return False
        self._at = end + (len(self._comment) if self._comment == "*/" else 0)
        self._comment = ""
        return True

    def _mark(self, at: int) -> str | None:
        return self._marks.at(self._text, at, self._final)

    def _key(self, char: str) -> bool:
        if char in QUOTES:
            return self._begin_string(char, for_key=True)
        if char in _OPENER:
            return self._close(char)
        if char in ",:={[(":  # a comma too many, braces written twice
            self._at += 1
            return True
        match = _WORD.match(self._text, self._at)
        if match is None:
            self._at += 1
            return True
        if match.end() == len(self._text) and not self._final and len(match[0]) < WINDOW:
            return False
        self._at = match.end()
        self._writer.frame.key = quoted(match[0])
        self._state = "colon"
        return True

    def _colon(self, char: str) -> bool:
        frame = self._writer.frame
        if char in ":=":
            self._at += 1
            frame.colon += ":"
            self._state = "value"
        elif char == "," or char in _OPENER:  # no value: no member
            frame.colon, self._state = "", "next"
        elif frame.key and char in "{[" or char in QUOTES:
            self._state = "value"
        else:  # a word that is no name of a member
            frame.colon, self._state = "", "next"
        return True

    def _next(self, char: str) -> bool:
        frame = self._writer.frame
        if char in _OPENER:
            return self._close(char)
        if char == ",":
            self._at += 1
            if "," not in frame.gap:
                frame.gap += ","
        elif char in QUOTES or ("," in frame.gap) or char in "{[(":
            pass
        elif frame.kind == "{":
            match = WORD_KEY.match(self._text, self._at)
            if match is None or not match[0].endswith((":", "=")):
                if match is not None and not self._final and len(match[0]) < 64:
                    return False
                self._close_all()  # something else begins here
                return True
        elif not (char.isalnum() or char in "-+."):
            self._close_all()
            return True
        if char != ",":
            self._state = "key" if frame.kind == "{" else "value"
        return True

    def _close(self, char: str) -> bool:
        """For a closing bracket: those that are missing before it are closed too."""
        kind = _OPENER[char]
        if self._writer.open[kind]:
            while self._writer.end() != kind:
                continue
            self._at += 1
            self._closed()
        elif kind in self._inside:
            self._close_all()
        else:
            self._at += 1
        return True

    def _close_all(self) -> None:
        if self._string is not None:
            self._end_string()
        if self._word:
            self._end_word()
        while self._writer.stack:
            self._writer.end()
        self.done = True

    def _closed(self) -> None:
        """A value is complete."""
        self._state = "next"
        self.done = not self._writer.stack

    # values

    def _value(self, char: str) -> bool:
        if char in QUOTES:
            return self._begin_string(char)
        if char in "{[" or (char == "(" and self._python):
            self._writer.begin(char)
            self._state = "key" if char == "{" else "value"
            self._at += 1
            return True
        if char in ":=":
            self._at += 1
            return True
        if self._writer.stack and (char == "," or char in _OPENER):
            if self._writer.frame.kind == "{":
                self._writer.frame.colon = ""
            self._state = "next"
            return True
        if not self._writer.stack and (char == "," or char in _OPENER):
            self.done = True
            return True
        if self._python:
            if len(self._text) - self._at < 3 and not self._final:
                return False
            prefix = _PREFIX.match(self._text, self._at)
            if prefix is not None:
                self._at = prefix.end()
                return self._begin_string(self._text[self._at], raw="r" in prefix[0].lower())
        self._word, self._nest = [char], int(char == "(")
        self._at += 1
        return True

    def _in_word(self) -> bool:
        """Up to what ends it; it may have blanks in it."""
        match = self._plain_word.match(self._text, self._at)
        if match is not None:
            self._word.append(match[0])
            self._at = match.end()
        if self._at == len(self._text):
            return False
        char = self._text[self._at]
        after_blank = self._word[-1][-1].isspace()
        if char in "([{" and self._python:
            self._nest += 1
        elif self._nest and char in ")]}":
            self._nest -= 1
        elif char in ",}\n\r" or char == "]" or (char == ")" and self._python):
            if not self._nest or char in "\n\r":
                return self._end_word()
        elif char == '"' and after_blank:
            return self._end_word()
        elif char in "/#" and after_blank:
            two = self._text[self._at : self._at + 2]
            if len(two) < 2 and not self._final:
                return False
            if char == "#" or two in ("//", "/*"):
                return self._end_word()
        elif char in self._first:
            mark = self._mark(self._at)
            if mark is None:
                return False
            if mark:
                return self._end_word()
        self._word.append(char)
        self._at += 1
        return True

    def _end_word(self) -> bool:
        word, self._word = "".join(self._word), []
        written = word.rstrip()
        if self._final and self._at == len(self._text):
            written = _whole(written, self._writer.place())
        if written.endswith(('"', "'")) and written[0] not in "\"'":
            written = written[:-1]  # its first quote is missing
        if written:
            fitted = fit_word(written, self._writer.place())
            self._writer.lead()
            self._writer.emit(fitted)
        elif self._writer.stack:
            self._writer.frame.colon = ""
        self._writer.blank(word[len(word.rstrip()) :])
        self._closed()
        return True

    # strings

    def _begin_string(self, char: str, for_key: bool = False, raw: bool = False) -> bool:
        text = self._text
        quote = QUOTES[char]
        three = text[self._at : self._at + 3]
        if char in "\"'" and not for_key:
            if len(three) < 3 and three == char * len(three) and not self._final:
                return False
            if three == char * 3:
                quote = three
        self._at += len(quote)
        types = None if for_key else self._writer.place().types
        stream = types is None or ("string" in types and not self._writer.place().values)
        stream = stream and not for_key
        self._for_key = for_key
        self._string = LooseString(quote, self._first, self._python, raw, stream)
        if stream:
            self._writer.lead()
            self._writer.emit('"')
        return True

    def _in_string(self, string: LooseString) -> bool:
        self._at = string.take(self._text, self._at, self._final)
        if self._at == len(self._text):
            return False
        text, at = self._text, self._at
        if string.stopped == "quote":
            behind = at + len(string.quote)
            ends = self._for_key or len(string.quote) > 1 or self._ends(behind)
            if ends is None:
                return False
            if ends:
                self._at = behind
                self._end_string()
                return True
            if CLOSER.match(text, behind):
                string.begin_doubt(len(string.quote))
            string.keep(text[at], text[at])
            self._at += 1
            return True
        if string.stopped == "mark":
            mark = self._mark(at)
            if mark is None:
                return False
            if mark and not self._for_key:
                restarts = self._marks.restarts(text, at, self._final, WINDOW)
                if restarts is None:
                    return False
                if restarts:
                    self._end_string(trim=True)
                    self._close_all()
                    return True
                string.begin_doubt(0)
            string.keep(text[at], text[at])
            self._at += 1
            return True
        return False

    def _pass_string(self) -> None:
        """Give out what is certain of a string that is still open."""
        if self._string is not None and self._string.stream:
            self._writer.emit(self._string.ready())

    def _end_string(self, trim: bool | None = None) -> None:
        """`trim`: the string was cut off, and closing brackets at its end are the call's."""
        string = self._string
        assert string is not None
        cut = (self._final and self._at == len(self._text)) if trim is None else trim
        text = string.end()
        if (cut or string.was_cut) and not self._for_key:
            closers = "".join(
                CLOSERS[c]
                for c in (self._inside + "".join(f.kind for f in self._writer.stack))[::-1]
            )
            text = trailing_closers(text, closers)
        self._string = None
        if self._for_key:
            self._writer.frame.key = f'"{text}"'
            self._state = "colon"
            return
        if string.stream:
            self._writer.emit(text + '"')
        else:
            fitted = self._fitted(decoded(f'"{text}"'))
            self._writer.lead()
            self._writer.emit(f'"{text}"' if fitted is None else fitted)
        self._closed()

    def _fitted(self, text: str) -> str | None:
        """A string where the schema wants something else, a container in a string too."""
        shape = self._writer.place()
        inner = text.strip()
        kind = {"{": "object", "[": "array"}.get(inner[:1])
        if kind is not None and shape.types is not None and kind in shape.types:
            if self._level < 3:
                return repaired(inner, shape, self._level + 1)
        return fit_string(text, shape)

    def _ends(self, at: int) -> bool | None:
        """Whether a quote before `at` ends its string; None when that is not known yet."""
        kind = self._writer.frame.kind if self._writer.stack else ""
        depth = len(self._writer.stack) + len(self._inside)
        place = StringEnd(self._text, self._final, kind, self._inside[-1:], depth, self._marks)
        return place.ends(at)


def repaired(text: str, shape: Shape, level: int = 0) -> str:
    """A whole value as JSON."""
    reader = LooseJson(shape, level=level)
    return reader.feed(text) + reader.finish()


def _whole(written: str, shape: Shape) -> str:
    """A word that the end of the text may have cut: a number without its last part, a literal
    that is begun."""
    if re.fullmatch(r"[-+]?\d[\d.]*(?:[.eE]|[eE][-+])", written):
        return written.rstrip("+-eE.")
    if written in ("-", "+", "."):
        return ""
    types = shape.types
    if types is None or "string" not in types:
        for literal in _LITERALS:
            if literal.startswith(written):
                return literal
    return written
