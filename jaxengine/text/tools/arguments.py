"""The arguments of a call: whatever the model wrote, what goes out is the text of a JSON object."""

from __future__ import annotations

import json
import re

from jaxengine.text.tools.fit import quoted
from jaxengine.text.tools.loose_json import LooseJson, repaired
from jaxengine.text.tools.marks import NO_MARKS, Marks
from jaxengine.text.tools.schema import ANY, Shape

FENCE = re.compile(r"```\w{0,20}\s")
_FENCE_BEGUN = re.compile(r"`{1,2}|```\w{0,20}")
_NOTHING = ("", "null", "none")
_MAX_LEVELS = 3  # of an object that is quoted as a string, and that again


class Arguments:
    """An object goes out as it comes (`LooseJson`). The object may be quoted as a string, be alone
    in a list, or stand in a code block; null and no text are none. Any other value is that of the
    only property, or without such a property it is called "input"."""

    def __init__(self, shape: Shape = ANY, inside: str = "", marks: Marks = NO_MARKS) -> None:
        self.done = False
        self._shape = shape
        self._inside = inside
        self._marks = marks
        self._waiting = ""
        self._fenced = False  # a code block has opened, or none will
        self._object: LooseJson | None = None
        self._other: LooseJson | None = None
        self._value: list[str] = []

    @property
    def rest(self) -> str:
        """The text behind them, once they are done."""
        reader = self._object or self._other
        return reader.rest if reader is not None else ""

    def feed(self, text: str) -> str:
        if self._object is None and self._other is None:
            self._waiting += text
            if not self._begin(final=False):
                return ""
            text, self._waiting = self._waiting, ""
        if self._object is not None:
            given = self._object.feed(text)
            self.done = self._object.done
            return given
        assert self._other is not None
        self._value.append(self._other.feed(text))
        self.done = self._other.done
        return self._converted() if self.done else ""

    def finish(self) -> str:
        """The text has ended."""
        given = ""
        if self._object is None and self._other is None:
            self._begin(final=True)
            text, self._waiting = self._waiting, ""
            if self._object is None and self._other is None:
                self.done = True
                return "{}"
            given = self.feed(text)
            if self.done:
                return given
        self.done = True
        if self._object is not None:
            return given + self._object.finish()
        assert self._other is not None
        self._value.append(self._other.finish())
        return self._converted()

    def _begin(self, final: bool) -> bool:
        """What kind of value it is; False when that is not known yet."""
        self._waiting = self._waiting.lstrip()
        if self._waiting.startswith("`") and not self._fenced:
            match = FENCE.match(self._waiting)
            if match is None and not final and _FENCE_BEGUN.fullmatch(self._waiting):
                return False
            self._fenced = True
            if match is not None:
                self._waiting = self._waiting[match.end() :].lstrip()
        if not self._waiting:
            return False
        if self._waiting[0] == "{":
            self._object = LooseJson(self._shape, self._inside, self._marks)
        else:
            self._other = LooseJson(ANY, self._inside, self._marks)
        return True

    def _converted(self) -> str:
        return _as_object("".join(self._value), self._shape)


def _as_object(text: str, shape: Shape) -> str:
    """For a value that is no object, as JSON."""
    for level in range(_MAX_LEVELS):
        value = json.loads(text) if text else None
        if isinstance(value, list) and not value:
            return "{}"
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            return repaired(json.dumps(value[0], ensure_ascii=False), shape)
        if value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING):
            return "{}"
        if not isinstance(value, str):
            break
        inner = value.strip()
        fence = FENCE.match(inner)
        inner = inner[fence.end() :].lstrip() if fence is not None else inner
        if inner.startswith("{"):
            return repaired(inner, shape, level + 1)
        if not inner.startswith('"'):
            break
        text = repaired(inner, ANY, level + 1)
    keys = shape.keys
    name = keys[0] if keys is not None and len(keys) == 1 else "input"
    return repaired(f"{{{quoted(name)}: {text}}}", shape)
