"""A call written as a JSON object with the function's name and its arguments, read as it comes."""

from __future__ import annotations

import json
import re
from enum import Enum

from jaxengine.text.tools.arguments import Arguments
from jaxengine.text.tools.base import Event
from jaxengine.text.tools.loose_json import LooseJson
from jaxengine.text.tools.marks import NO_MARKS, Marks
from jaxengine.text.tools.schema import ANY, Tools

_NAME = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")  # beside these, in a call
_KEY = re.compile(r"""(?:"([^"\\\n]{1,80})"|'([^'\\\n]{1,80})'|([\w$.\-]{1,80}))\s{0,80}[:=]""")
_LONGEST_KEY = 256  # with the blanks around it
_LONGEST_NAME = 300


class Strictness(Enum):
    """What makes a JSON object a call."""

    ANY_NAME = 0  # a name
    DECLARED = 1  # the name of one of the request's functions, and no keys that calls do not have
    WITH_ARGUMENTS = 2  # and arguments too


class JsonCall:
    """Arguments go out as they come, once the name is known (`Arguments`).

    They may stand beside the name instead of in an object of their own, and name and arguments
    together in a "function" of their own.
    """

    def __init__(
        self,
        tools: Tools,
        strictness: Strictness = Strictness.ANY_NAME,
        inside: str = "",
        marks: Marks = NO_MARKS,
    ) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.broken = False
        self._tools = tools
        self._strict = strictness
        self._inside = inside
        self._marks = marks
        self._text = ""
        self._state = "open"
        self._level = 0  # 1 inside of "function": {...}
        self._key = ""
        self._name: str | None = None
        self._value: LooseJson | None = None
        self._shown: list[str] = []  # of the value, as JSON
        self._raw: list[str] = []  # of the value, as it is written
        self._arguments: Arguments | None = None
        self._early: str | None = None  # arguments that came before the name, as written
        self._beside: list[tuple[str, str]] = []  # other members, as written
        self._sent = False

    def feed(self, text: str, out: list[Event]) -> str:
        self._text += text
        while not (self.done or self.failed) and self._step(out, False):
            continue
        return self._left()

    def finish(self, out: list[Event]) -> str:
        while not (self.done or self.failed):
            if self._arguments is not None and self._state == "arguments":
                out.append(Event("arguments", self._arguments.finish()))
                self._text, self._state = self._arguments.rest, "next"
            if not self._step(out, True) and self._state != "arguments":
                break
        if not (self.done or self.failed):
            self._end(out)
        return self._left()

    def _left(self) -> str:
        if not (self.done or self.failed):
            return ""
        text, self._text = self._text, ""
        return text

    def _step(self, out: list[Event], final: bool) -> bool:
        """Go on as far as one state does; False when more text is needed."""
        if self._state == "arguments":
            return self._in_arguments(out)
        if self._state == "value":
            return self._in_value(out, final)
        self._text = self._text.lstrip()
        if not self._text:
            return False
        char = self._text[0]
        if self._state == "open":
            self.failed = char != "{"
            self._state = "first"
        elif self._state in ("first", "again") and char not in "},":
            return self._member(out, final)
        elif char == "," and self._state != "first":
            self._state = "again"
        elif char == "}" and self._level:
            self._level, self._state = 0, "next"
        elif char == "}":
            self._text = self._text[1:]
            self._end(out)
            return False
        elif self._state == "next" and char in "\"'":
            self._state = "again"  # the comma is missing
            return True
        else:
            self._break(out)
            return False
        if not self.failed:
            self._text = self._text[1:]
        return True

    def _break(self, out: list[Event]) -> None:
        """What stands there is no part of a call."""
        if self.started or (self._name is not None and self._early is not None):
            self.broken = True
            self._end(out)
        else:
            self.failed = True

    def _member(self, out: list[Event], final: bool) -> bool:
        match = _KEY.match(self._text)
        if match is None:
            if len(self._text) >= _LONGEST_KEY or not _may_be_key(self._text):
                self._break(out)
            elif final and self._name is not None:
                self._text = ""  # a name that was cut off
            return False
        self._key = match[1] or match[2] or match[3]
        self._text = self._text[match.end() :]
        self._state = "value"
        known = self._key in (*_NAME, *_ARGUMENTS, *_OTHERS)
        self.failed = not known and self._strict is not Strictness.ANY_NAME and not self.started
        return not self.failed

    def _in_value(self, out: list[Event], final: bool) -> bool:
        if self._value is None:
            self._text = self._text.lstrip()
            if not self._text:
                return False
            if self._key == "function" and self._text[0] == "{" and not self._level:
                self._text, self._level, self._state = self._text[1:], 1, "first"
                return True
            if self._key in _ARGUMENTS and not self._sent and self._early is None:
                if self._name is not None and not self.started:
                    self._start(out)
                if self.started:
                    return self._open_arguments()
            self._value = LooseJson(ANY, self._inside + "{", self._marks)
            self._shown, self._raw = [], []
        text, self._text = self._text, ""
        if self._key in _NAME and not self.started:
            room = _LONGEST_NAME - sum(map(len, self._raw))
            text, self._text = text[:room], text[room:]
        self._raw.append(text)
        self._shown.append(self._value.feed(text))
        if final and not self._text and not self._value.done:
            self._shown.append(self._value.finish())
        if not self._value.done:
            self.failed = bool(self._text)  # too long for a name
            return False
        self._text = self._value.rest + self._text
        raw = "".join(self._raw)
        read = len(raw) - len(self._value.rest)
        if final and self._key in _NAME and raw[:read].rstrip()[1:][-1:] not in ('"', "'"):
            self.failed = not self.started  # the name may have been longer
            return False
        self._value = None
        self._state = "next"
        self._complete("".join(self._shown), raw[:read], out)
        return not self.failed

    def _complete(self, shown: str, raw: str, out: list[Event]) -> None:
        if self._key in _NAME and self._name is None:
            name = json.loads(shown) if shown.startswith('"') else None
            found = self._tools.find(name) if isinstance(name, str) else None
            if found is None and self._strict is not Strictness.ANY_NAME:
                self.failed = True
            elif isinstance(name, str) and name.strip():
                self._name = found or name.strip()
                if self._strict is Strictness.ANY_NAME or self._early is not None:
                    self._start(out)
            elif self._key == "name":
                self.failed = True
        elif self._key in _ARGUMENTS and self._early is None and not self._sent:
            self._early = raw
        elif self._key not in (*_NAME, *_ARGUMENTS, *_OTHERS):
            self._beside.append((self._key, raw))

    def _start(self, out: list[Event]) -> None:
        assert self._name is not None
        self.started = True
        out.append(Event("call", self._name))
        if self._early is not None:
            self._give(self._early, out)

    def _give(self, text: str, out: list[Event]) -> None:
        """Arguments that are there as a whole."""
        reader = Arguments(self._tools.shape(self._name or ""))
        out.append(Event("arguments", reader.feed(text) + reader.finish()))
        self._sent = True

    def _open_arguments(self) -> bool:
        self._arguments = Arguments(
            self._tools.shape(self._name or ""), self._inside + "{" * (1 + self._level), self._marks
        )
        self._sent, self._state = True, "arguments"
        return True

    def _in_arguments(self, out: list[Event]) -> bool:
        assert self._arguments is not None
        if not self._text:
            return False
        given = self._arguments.feed(self._text)
        self._text = ""
        if given:
            out.append(Event("arguments", given))
        if self._arguments.done:
            self._text, self._state = self._arguments.rest, "next"
        return self._arguments.done

    def _end(self, out: list[Event]) -> None:
        """The object is closed, or nothing more comes."""
        if not self.started and self._name is not None:
            if self._strict is not Strictness.WITH_ARGUMENTS:
                self._start(out)
        self.done, self.failed = self.started, not self.started
        if self.failed:
            return
        if not self._sent:
            keys = self._tools.shape(self._name or "").keys or ()
            beside = [f"{json.dumps(k)}: {v.strip()}" for k, v in self._beside if k in keys]
            self._give("{" + ", ".join(beside) + "}", out)


def _may_be_key(text: str) -> bool:
    """Whether it can still become a key and a colon."""
    if text[0] in "\"'":
        body, closed, behind = text[1:].partition(text[0])
        return "\n" not in body and len(body) <= 80 and (not closed or not behind.strip())
    match = re.match(r"[\w$.\-]+\s*", text)
    return match is not None and match.end() == len(text)


class JsonCalls:
    """A JSON list of such objects. Behind the first call, what is none is text again."""

    def __init__(
        self,
        tools: Tools,
        strictness: Strictness = Strictness.ANY_NAME,
        marks: Marks = NO_MARKS,
    ) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.broken = False
        self._tools, self._strict, self._marks = tools, strictness, marks
        self._call: JsonCall | None = None
        self._raw: list[str] = []  # of a further object that is no call yet
        self._state = "open"

    def feed(self, text: str, out: list[Event]) -> str:
        while text and not (self.done or self.failed):
            if self._call is not None:
                text = self._in_call(self._call, text, out)
                continue
            char = text[0]
            if char == "{" and self._state != "open":
                self._call = JsonCall(self._tools, self._strict, "[", self._marks)
                self._raw = []
                continue
            if self._state == "open" and char == "[":
                self._state = "first"
            elif char == "," and self._state == "next":
                pass
            elif self._state == "next" and char == "]":
                self.done = True
            elif not char.isspace():
                self.failed = not self.started
                self.done = self.broken = self.started
                return text
            text = text[1:]
        return text

    def finish(self, out: list[Event]) -> str:
        rest = ""
        while self._call is not None and not (self.done or self.failed):
            call, self._call = self._call, None
            rest = call.finish(out)
            self.started |= call.started
            if not call.started:
                rest = "".join(self._raw)
                break
            self._state = "next"
            rest = self.feed(rest, out)
        self.done, self.failed = self.started, not self.started
        return rest

    def _in_call(self, call: JsonCall, text: str, out: list[Event]) -> str:
        rest = call.feed(text, out)
        if not call.started:
            self._raw.append(text)
        self.started |= call.started
        if call.failed:
            self.failed = not self.started
            self.done = self.broken = self.started
            return "".join(self._raw) if self.started else rest
        if call.done:
            self._call, self._state = None, "next"
        return rest
