"""The JSON text that a value becomes while it is read (`LooseJson`)."""

from __future__ import annotations

from jaxengine.text.tools.fit import quoted
from jaxengine.text.tools.loose_string import decoded
from jaxengine.text.tools.schema import ANY, Shape

CLOSERS = {"{": "}", "[": "]", "(": ")"}
_BLANKS = " \t\r\n"
_MAX_DEPTH = 100  # deeper values go out as the text that they are: JSON readers have a limit


class Frame:
    """A container that is open."""

    __slots__ = ("colon", "count", "gap", "key", "kind", "shape")

    def __init__(self, kind: str, shape: Shape) -> None:
        self.kind = kind
        self.shape = shape
        self.count = 0  # members given out
        self.gap = ""  # blanks, and a comma, before the next member
        self.key = ""  # of that member, as a JSON string
        self.colon = ""


class JsonWriter:
    """What stands between members goes out only with the next one. A container where the schema
    wants a string goes out as one."""

    def __init__(self, shape: Shape) -> None:
        self.stack: list[Frame] = []
        self.open = {"{": 0, "[": 0, "(": 0}  # how many of each kind are in the stack
        self._shape = shape
        self._out: list[str] = []
        self._wrapped = 0  # depth at which a container goes out as a string; 0: none does

    @property
    def frame(self) -> Frame:
        """The innermost container."""
        return self.stack[-1]

    def taken(self) -> str:
        """What is new."""
        out, self._out = "".join(self._out), []
        return out

    def emit(self, text: str) -> None:
        self._out.append(quoted(text)[1:-1] if self._wrapped else text)

    def place(self) -> Shape:
        """What the next value may be."""
        if self._wrapped:
            return ANY
        if not self.stack:
            return self._shape
        frame = self.frame
        if frame.kind == "{":
            return frame.shape.member(decoded(frame.key))
        return frame.shape.item(frame.count)

    def blank(self, text: str, in_member: bool = False) -> None:
        """Blanks as they are written, before a member or (`in_member`) in it."""
        if not self.stack:
            return
        text = "".join(c if c in _BLANKS else " " for c in text)
        if in_member and self.frame.kind == "{":
            self.frame.colon += text
        else:
            self.frame.gap += text

    def lead(self) -> None:
        """Give out what stands before a member: comma, blanks, name."""
        if not self.stack:
            return
        frame = self.frame
        gap = frame.gap
        if frame.count and "," not in gap:
            gap = f",{gap}" if gap else ", "
        elif not frame.count:
            gap = gap.replace(",", "")
        frame.count += 1
        frame.gap = ""
        if frame.kind == "{":
            gap += frame.key + (frame.colon if ":" in frame.colon else ": ")
            frame.key = frame.colon = ""
        self.emit(gap)

    def begin(self, kind: str) -> None:
        """A container opens. A tuple, "(", is a list."""
        shape = self.place()
        types = shape.types
        self.lead()
        name = "object" if kind == "{" else "array"
        unfit = types is not None and name not in types and "string" in types
        self.stack.append(Frame(kind, shape))
        self.open[kind] += 1
        if not self._wrapped and (unfit or len(self.stack) > _MAX_DEPTH):
            self.emit('"')
            self._wrapped = len(self.stack)
        self.emit("{" if kind == "{" else "[")

    def end(self) -> str:
        """The innermost one closes; returns its kind."""
        frame = self.stack.pop()
        self.open[frame.kind] -= 1
        self.emit(frame.gap.replace(",", ""))
        self.emit("}" if frame.kind == "{" else "]")
        if self._wrapped == len(self.stack) + 1:
            self._wrapped = 0
            self.emit('"')
        return frame.kind
