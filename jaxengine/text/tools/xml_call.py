"""A call as Qwen3-Coder writes it:

<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>

Names may be quoted or attributes (<function name="NAME">), and the parameters may be one JSON
object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxengine.text.tools.arguments import Arguments
from jaxengine.text.tools.base import Event
from jaxengine.text.tools.calls import Where
from jaxengine.text.tools.fit import number, quoted, whole_number
from jaxengine.text.tools.loose_json import repaired
from jaxengine.text.tools.marks import Marks
from jaxengine.text.tools.schema import ANY, Shape, Tools
from jaxengine.text.tools.xml_tags import FUNCTION, TOOL_CALL, may_be_tag, tag_at
from jaxengine.text.tools.xml_value import XmlValue

_TEXT = frozenset({"string"})
_TEXT_OR_NULL = frozenset({"string", "null"})
_LONGEST_NULL = 8  # of a value that may be null, with blanks

__all__ = ["FUNCTION", "XmlCall", "typed"]


class XmlCall:
    """Text goes out as it comes, other values once they are complete. What is missing at the end
    is closed: a value that was cut off goes out as it is."""

    def __init__(self, tools: Tools, ends: Sequence[str], where: Where) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.broken = False
        self._tools = tools
        self._marks = Marks((*ends, *((TOOL_CALL,) if ends else ()), "</function>"))
        self._where = where
        self._text = ""
        self._state = "open"
        self._name = ""
        self._shape = ANY
        self._given: list[str] = []
        self._value: XmlValue | None = None
        self._parts: list[str] = []  # of the value, while it may still be other than text
        self._streams = False
        self._object: Arguments | None = None

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
                self._end_value(out)
            if self._object is not None and self._state == "object":
                out.append(Event("arguments", self._object.finish()))
                self._text, self._state = self._object.rest, "between"
            if not self._step(out, True) and self._state not in ("value", "object"):
                break
        if self.started and not self.done:
            self._close(out)
        self.failed = not self.started
        return self._left()

    def _left(self) -> str:
        if not (self.done or self.failed):
            return ""
        text, self._text = self._text, ""
        return text

    def _step(self, out: list[Event], final: bool) -> bool:
        """Go on as far as one state does; False when more text is needed."""
        if self._state == "value":
            return self._in_value(out)
        if self._state == "object":
            return self._in_object(out)
        self._text = self._text.lstrip()
        if self._state == "open":
            return self._open(final)
        if not self._text:
            # nothing follows: a call without arguments, if its tag was there
            self.failed = final and not self.started and not self._where.tagged
            if final and not self.started and not self.failed:
                self._start(out)
            return False
        tag = tag_at(self._text, 0, final)
        if tag is None:
            return False
        if not self.started:
            begins = ("parameter", "/function") + ("/call",) * self._where.tagged
            cut = final and self._where.tagged and may_be_tag(self._text)
            if tag.kind not in begins and self._text[0] != "{" and not cut:
                self.failed = True
                return False
            self._start(out)
        if tag.kind == "parameter" and self._object is None:
            self._text = self._text[tag.end :]
            self._begin_value(tag.name)
        elif tag.kind == "/parameter":
            self._text = self._text[tag.end :]
        elif tag.kind == "/function":
            self._text = self._text[tag.end :]
            self._close(out)
        elif self._text[0] == "{" and not self._given and self._object is None:
            self._object = Arguments(self._shape, marks=self._marks)
            self._state = "object"
        else:
            if final and may_be_tag(self._text):
                self._text = ""  # it was cut off
            self.broken = tag.kind in ("", "parameter") and bool(self._text)
            self._close(out)
        return True

    def _open(self, final: bool) -> bool:
        tag = tag_at(self._text, 0, final)
        if tag is None or not self._text:
            return False
        name = self._tools.find(tag.name)
        if tag.kind != "function" or (name is None and self._where.thoughts):
            self.failed = True
            return False
        self._name = name or tag.name
        self._shape = self._tools.shape(self._name)
        self._text = self._text[tag.end :]
        self._state = "between"
        return True

    def _start(self, out: list[Event]) -> None:
        self.started = True
        out.append(Event("call", self._name))

    def _close(self, out: list[Event]) -> None:
        if self._object is None:
            out.append(Event("arguments", "}" if self._given else "{}"))
        self.done = True

    def _in_object(self, out: list[Event]) -> bool:
        assert self._object is not None
        if not self._text:
            return False
        given = self._object.feed(self._text)
        self._text = ""
        if given:
            out.append(Event("arguments", given))
        if self._object.done:
            self._text, self._state = self._object.rest, "between"
        return self._object.done

    def _begin_value(self, key: str) -> None:
        lead = ", " if self._given else "{"
        self._given.append(key)
        self._parts = [f"{lead}{quoted(key)}: "]
        self._streams = False
        self._value = XmlValue(
            key, self._given, self._shape.keys, lambda name: self._tools.find(name) is not None
        )
        self._state = "value"

    def _in_value(self, out: list[Event]) -> bool:
        assert self._value is not None
        if not self._text:
            return False
        text, self._text = self._text, ""
        self._give(self._value.feed(text), out)
        if not self._value.done:
            return False
        self._text = self._value.rest
        self._end_value(out)
        return True

    def _give(self, text: str, out: list[Event]) -> None:
        """More of the value."""
        if not text:
            return
        if self._streams:
            out.append(Event("arguments", quoted(text)[1:-1]))
            return
        self._parts.append(text)
        shape = self._shape.member(self._given[-1])
        types = shape.types
        if shape.values or not (types is None or types <= _TEXT_OR_NULL):
            return
        value = "".join(self._parts[1:])
        if types in (None, _TEXT) or len(value.strip()) > _LONGEST_NULL:
            self._streams = True
            out.append(Event("arguments", f'{self._parts[0]}"{quoted(value)[1:-1]}'))

    def _end_value(self, out: list[Event]) -> None:
        if self._streams:
            out.append(Event("arguments", '"'))
        else:
            shape = self._shape.member(self._given[-1])
            shown = typed("".join(self._parts[1:]), shape)
            out.append(Event("arguments", self._parts[0] + shown))
        self._value, self._state = None, "between"


def typed(text: str, shape: Shape) -> str:
    """The JSON value that text without quotes stands for, by the types that it may have. Without
    any type it is text, and so is what fits no type."""
    types = shape.types
    stripped = text.strip()
    for value in shape.values:
        shown = value if isinstance(value, str) else json.dumps(value)
        if shown == stripped or (isinstance(value, str) and value == text):
            return quoted(value) if isinstance(value, str) else shown
    if types is None or types == _TEXT:
        return quoted(text)
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower()
    if "null" in types and stripped.lower() in ("null", "none"):
        return "null"
    kind = {"{": "object", "[": "array"}.get(stripped[:1])
    if kind in types:
        value = _loaded(stripped)
        if value is not None:
            return repaired(value, shape)
        if "string" not in types:
            return repaired(stripped, shape)
    if "string" in types:
        return quoted(text)
    spelled = number(stripped)
    if spelled is not None and "integer" in types:
        whole = spelled if "number" in types else whole_number(spelled)
        if whole is not None:
            return whole
    if stripped[:1] == '"' and kind is None:
        inner = _loaded(stripped)
        if inner is not None:
            return repaired(inner, shape)
    return quoted(text)


def _loaded(text: str) -> str | None:
    """Valid JSON in the usual spelling."""
    try:
        value: Any = json.loads(text)
        shown = json.dumps(value, ensure_ascii=False, allow_nan=False)
        shown.encode()
    except (ValueError, RecursionError):
        return None
    return shown
