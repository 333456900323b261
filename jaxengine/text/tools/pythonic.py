"""pythonic: [f(a=1, b="x"), g()], a Python list of calls with literal arguments, anywhere in the
text."""

from __future__ import annotations

import re

from jaxengine.text.tools.base import CallParser, Event, Parser
from jaxengine.text.tools.calls import FENCE, Calls, Format, Where
from jaxengine.text.tools.fit import quoted
from jaxengine.text.tools.loose_json import LooseJson
from jaxengine.text.tools.marks import Marks
from jaxengine.text.tools.schema import ANY, Tools

TAGS = ("<|python_tag|>", "<|python_start|>")
ENDS = ("<|python_end|>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")
MARKS = Marks((*TAGS, *ENDS))
_CALL = re.compile(r"([^\W\d][\w.\-]{0,255})\s{0,64}\(")
_CALL_BEGUN = re.compile(r"[^\W\d][\w.\-]{0,255}\s{0,64}")
_KEY = re.compile(r"([^\W\d]\w{0,127})\s{0,64}=(?!=)(?=.|\s)", re.DOTALL)
_KEY_BEGUN = re.compile(r"[^\W\d]\w{0,127}\s{0,64}=?")
_LITERAL = re.compile(r"[\"'\[{]|[-+]?[.\d]|(?:True|False|None|true|false|null)\s{0,64}[,)]")
_LITERAL_BEGUN = re.compile(r"[-+]|[TFNtfn][a-z]{0,4}\s{0,64}")


def pythonic(tools: Tools) -> Parser:
    """A list that does not begin with a call of one of the request's functions is plain text."""

    def reader(first: str, where: Where) -> CallParser | None:
        return PythonCalls(tools) if first == "[" else None

    return Calls(Format(TAGS, ("[",), ENDS, reader, silent=True, last=("[", FENCE)))


class PythonCalls:
    """Arguments go out as they come. One without a name is that of the property in its place."""

    def __init__(self, tools: Tools) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.broken = False
        self._tools = tools
        self._text = ""
        self._state = "open"
        self._shape = ANY
        self._called = False  # the call under way is not closed
        self._count = 0  # arguments of this call that were given out
        self._place = 0  # likewise, those that were read
        self._lead = ""  # what goes out before the argument under way
        self._value: LooseJson | None = None

    def feed(self, text: str, out: list[Event]) -> str:
        self._text += text
        while not (self.done or self.failed) and self._step(out, False):
            continue
        return self._left()

    def finish(self, out: list[Event]) -> str:
        while not (self.done or self.failed):
            if self._value is not None:
                self._give(self._value.finish(), out)
                self._text = self._value.rest
                self._value = None
            if not self._step(out, True) and self._value is None:
                break
        self._close(out)
        self.done, self.failed = self.started, not self.started
        return self._left()

    def _left(self) -> str:
        if not (self.done or self.failed):
            return ""
        text, self._text = self._text, ""
        return text

    def _step(self, out: list[Event], final: bool) -> bool:
        """Go on as far as one state does; False when more text is needed."""
        if self._value is not None:
            return self._in_value(self._value, out)
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if self._state == "argument":
            return self._argument(out, final)
        char = self._text[0]
        if self._state == "open":
            self._state = "first"  # behind the bracket, which `reader` saw
        elif char == "]" and self.started:
            self.done = True
        elif char not in ",;" or self._state == "first":
            return self._call(out, final)
        self._text = self._text[1:]
        return not self.done

    def _call(self, out: list[Event], final: bool) -> bool:
        match = _CALL.match(self._text)
        if match is None:
            if not final and _CALL_BEGUN.fullmatch(self._text):
                return False
            return self._no_call()
        name = self._tools.find(match[1])
        if name is None:
            return self._no_call()
        shape = self._tools.shape(name)
        begins = self._begins(self._text[match.end() :].lstrip()[:256], shape.keys or (), final)
        if begins is None:
            return False
        if not begins:
            return self._no_call()
        out.append(Event("call", name))
        self.started = self._called = True
        self._shape, self._state = shape, "argument"
        self._count = self._place = 0
        self._text = self._text[match.end() :]
        return True

    def _begins(self, text: str, keys: tuple[str, ...], final: bool) -> bool | None:
        """Whether arguments can begin so: a name and "=", a literal, or none at all."""
        if not text:
            return False if final else None
        if text[0] == ")" or _KEY.match(text):
            return True
        if _LITERAL.match(text):
            return bool(keys)
        begun = _KEY_BEGUN.fullmatch(text) or (keys and _LITERAL_BEGUN.fullmatch(text))
        return None if begun and not final else False

    def _no_call(self) -> bool:
        self.failed = not self.started
        self.done = self.broken = self.started
        return False

    def _argument(self, out: list[Event], final: bool) -> bool:
        char = self._text[0]
        if char in ")]":
            self._close(out)
            self._state = "next"
            self._text = self._text[char == ")" :]
            return True
        if char == ",":
            self._text = self._text[1:]
            return True
        match = _KEY.match(self._text)
        keys = self._shape.keys or ()
        if match is not None:
            key, end = match[1], match.end()
        elif not final and _KEY_BEGUN.fullmatch(self._text):
            return False
        elif _LITERAL.match(self._text) and self._place < len(keys):
            key, end = keys[self._place], 0
        elif not final and keys and _LITERAL_BEGUN.fullmatch(self._text):
            return False
        else:
            if final and _KEY_BEGUN.fullmatch(self._text):
                self._text = ""  # a name that was cut off
            self._close(out)
            return self._no_call()
        self._text = self._text[end:]
        self._lead = f"{', ' if self._count else '{'}{quoted(key)}: "
        self._place += 1
        self._value = LooseJson(self._shape.member(key), "[(", MARKS, python=True)
        return True

    def _in_value(self, value: LooseJson, out: list[Event]) -> bool:
        if not self._text:
            return False
        text, self._text = self._text, ""
        self._give(value.feed(text), out)
        if not value.done:
            return False
        self._text, self._value = value.rest, None
        return True

    def _give(self, text: str, out: list[Event]) -> None:
        if text:
            out.append(Event("arguments", self._lead + text))
            self._count += bool(self._lead)
            self._lead = ""

    def _close(self, out: list[Event]) -> None:
        if self._called:
            out.append(Event("arguments", "}" if self._count else "{}"))
        self._called = False
