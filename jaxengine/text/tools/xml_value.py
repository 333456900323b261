"""The value of one parameter in Qwen3-Coder's form: text up to its closing tag, which may be
missing or misspelt, while the text itself may hold such tags."""

from __future__ import annotations

from collections.abc import Callable, Collection

from jaxengine.text.tools.xml_tags import Tag, may_be_tag, tag_at

_LONGEST_BLANK = 256  # between tags that belong together; between a value and its closing tag


class XmlValue:
    """The reading that keeps most of the text:

    - </parameter> ends the value if the next parameter, </function>, </tool_call> or the text's end
      follows. Inside of a call that is written out in the value (a text about this format), it
      does not. The parameter's own name may close it as well.
    - So does, on a line of its own, the tag of a parameter that the function has and that was not
      given yet.
    - Other tags that may end it (</function> alone, </parameter> before other text, the next call)
      do so only if no certain end follows in the whole text. Until that is known nothing more goes
      out.

    One line break before and one behind the value belong to the tags.
    """

    def __init__(
        self,
        name: str,
        given: Collection[str],
        declared: Collection[str] | None,
        is_tool: Callable[[str], bool],
    ) -> None:
        self.done = False
        self.rest = ""  # the text behind the value and its closing tag, once it is done
        # an element of that name in the value is none of ours
        self._opener = f"<{name}" if name not in ("function", "parameter", "tool_call") else ""
        self._closer = f"</{name}>" if self._opener else ""
        self._elements = 0
        self._given = given
        self._declared = declared
        self._is_tool = is_tool
        self._text = ""
        self._at = 0
        self._final = False
        self._out: list[str] = []
        self._tail = ""  # a line break and blanks that may belong to the closing tag
        self._begun = False
        self._lines = False  # the value stands on lines of its own
        self._line_blank = True  # nothing but blanks is on this line yet
        self._calls: list[str] = []  # tags of calls that are open inside of the value
        self._parameters = 0  # likewise of parameters
        self._doubt: list[str] | None = None  # the text since the value may have ended
        self._doubt_skip = 0  # so much of it is the closing tag

    def feed(self, text: str) -> str:
        """More text; returns more of the value."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while not self.done and self._step():
            continue
        return self._taken()

    def finish(self) -> str:
        """The text has ended."""
        self._final = True
        while not self.done and self._step():
            continue
        if not self.done:
            if self._doubt is not None:
                held, self._doubt = "".join(self._doubt), None
                self._end(held[self._doubt_skip :] + self._text[self._at :])
            else:
                left = self._text[self._at :]
                cut = left.startswith("</") and len(left) > 2 and may_be_tag(left, self._closer)
                if left and not cut:
                    self._keep(left)
                self._end("")
        return self._taken()

    def _taken(self) -> str:
        out, self._out = "".join(self._out), []
        return out

    def _step(self) -> bool:
        if not self._begun:
            return self._begin()
        text = self._text
        at = text.find("<", self._at)
        if at < 0:
            self._keep(text[self._at :])
            self._at = len(text)
            return False
        self._keep(text[self._at : at])
        self._at = at
        if self._opener and text.startswith(self._opener, at):
            self._elements += 1
            return self._as_text(at + len(self._opener))
        if self._opener.startswith(text[at:]) and not self._final:
            return False
        tag = tag_at(text, at, self._final, self._closer)
        if tag is None:
            return False
        if not tag.kind:
            if self._final and may_be_tag(text[at:], self._closer):
                return False
            return self._as_text(at + 1)
        if tag.kind == "parameter":
            return self._parameter(tag)
        behind = self._behind(tag.end)
        if behind is None:
            return False
        if tag.kind == "/name" and (self._elements or behind.kind in ("/parameter", "text")):
            self._elements -= self._elements > 0
            return self._as_text(tag.end)
        if tag.kind in ("/parameter", "/name"):
            return self._parameter_end(tag, behind)
        if tag.kind in ("call", "function"):
            return self._call(tag, behind)
        return self._call_end(tag, behind)

    def _begin(self) -> bool:
        if self._text in ("", "\r") and not self._final:
            return False
        for lead in ("\r\n", "\n"):
            if self._text.startswith(lead):
                self._at, self._lines = len(lead), True
                break
        self._begun = True
        return True

    def _keep(self, text: str) -> None:
        """Text of the value, unless it has ended before."""
        if not text:
            return
        line = text.rpartition("\n")
        self._line_blank = (bool(line[1]) or self._line_blank) and not line[2].strip()
        if self._doubt is not None:
            self._doubt.append(text)
        else:
            self._pass(text)

    def _pass(self, text: str) -> None:
        text = self._tail + text
        at = text.rfind("\n")
        if at < 0 or text[at:].strip() or len(text) - at > _LONGEST_BLANK:
            at = len(text)
        elif text[at - 1 : at] == "\r":
            at -= 1
        if at == len(text) and text.endswith("\r"):
            at -= 1
        self._out.append(text[:at])
        self._tail = text[at:]

    def _as_text(self, end: int) -> bool:
        self._keep(self._text[self._at : end])
        self._at = end
        return True

    def _end(self, rest: str) -> bool:
        if self._doubt is not None:
            held, self._doubt = "".join(self._doubt), None
            self._pass(held)
        if not self._tail.strip("\r"):  # no line break: it is text
            self._out.append(self._tail)
        self._tail = ""
        self.rest, self._text, self._at = rest, "", 0
        self.done = True
        return False

    def _begin_doubt(self, skip: int, end: int) -> bool:
        """The value may end here, before a tag up to `end`, of which `skip` are its own."""
        if self._doubt is None:
            self._doubt, self._doubt_skip = [], skip
        return self._as_text(end)

    @property
    def _alone(self) -> bool:
        """A tag here is where tags stand, and not in the midst of a line of text."""
        return self._line_blank or not self._lines

    def _behind(self, at: int) -> Tag | None:
        """What follows there, after blanks: a tag, "text", or "end"; None when it is not known."""
        text, start = self._text, at
        while at < len(text) and text[at].isspace() and at - start < _LONGEST_BLANK:
            at += 1
        if at == len(text):
            return Tag("end", at) if self._final else None
        tag = tag_at(text, at, self._final)
        if tag is not None and not tag.kind:
            return Tag("end" if self._final and may_be_tag(text[at:]) else "text", at)
        return tag

    def _parameter(self, tag: Tag) -> bool:
        """The next one, if this one's closing tag is missing."""
        if not self._calls and self._alone and self._is_next(tag.name):
            return self._end(self._text[self._at :])
        self._parameters += 1
        return self._as_text(tag.end)

    def _is_next(self, name: str) -> bool:
        known = self._declared is None or name in self._declared
        return known and name not in self._given

    def _parameter_end(self, tag: Tag, behind: Tag) -> bool:
        nested = self._parameters > 0
        if self._calls:
            ends = False
        elif behind.kind == "parameter":
            ends = not nested or self._is_next(behind.name)
        elif behind.kind == "/parameter":
            ends = not nested
        elif behind.kind in ("call", "function"):
            begins = self._begins_call(behind)
            if begins is None:
                return False
            ends = begins
        else:
            ends = behind.kind != "text"
        if ends:
            return self._end(self._text[tag.end :])
        self._parameters -= nested
        if self._calls or nested or not self._alone or self._on_line(tag.end):
            return self._as_text(tag.end)
        return self._begin_doubt(tag.end - self._at, tag.end)

    def _on_line(self, at: int) -> bool:
        """Text goes on behind it on the same line, where values stand on lines of their own."""
        line = self._text[at : at + _LONGEST_BLANK].partition("\n")[0]
        return self._lines and bool(line.strip())

    def _begins_call(self, tag: Tag) -> bool | None:
        """Whether this tag begins a call of one of the request's functions."""
        if tag.kind == "call":
            inner = self._behind(tag.end)
            if inner is None or inner.kind != "function":
                return None if inner is None else False
            tag = inner
        behind = self._behind(tag.end)
        if behind is None:
            return None
        return behind.kind in ("parameter", "/function") and self._is_tool(tag.name)

    def _call(self, tag: Tag, behind: Tag) -> bool:
        """A call that is written out in the value, or the next one: it may be either."""
        inner = behind if tag.kind == "call" and behind.kind == "function" else tag
        if inner.kind != "function":
            return self._as_text(tag.end)
        follows = self._behind(inner.end)
        if follows is None:
            return False
        if follows.kind not in ("parameter", "/function"):
            return self._as_text(inner.end)
        self._calls += ["call", "function"] if inner is not tag else ["function"]
        if self._is_tool(inner.name) and self._alone and len(self._calls) <= 2:
            return self._begin_doubt(0, inner.end)
        return self._as_text(inner.end)

    def _call_end(self, tag: Tag, behind: Tag) -> bool:
        """</function> or </tool_call>: of a call in the value, or of this one."""
        kind = tag.kind[1:]
        if kind in self._calls:
            while self._calls.pop() != kind:
                continue
            self._parameters = 0
            return self._as_text(tag.end)
        if behind.kind == "end":
            return self._end_or_doubt(tag)
        last = behind
        if tag.kind == "/function" and behind.kind == "/call":
            found = self._behind(behind.end)
            if found is None:
                return False
            last = found
        if last.kind in ("call", "function") and self._alone:
            begins = self._begins_call(last)
            if begins is None:
                return False
            if begins:
                return self._end_or_doubt(tag)
        paired = tag.kind == "/function" and behind.kind == "/call"
        if not paired and (not self._alone or self._on_line(tag.end)):
            return self._as_text(tag.end)
        return self._begin_doubt(0, tag.end)

    def _end_or_doubt(self, tag: Tag) -> bool:
        """The value has ended, here or where that was in doubt before."""
        if self._doubt is None:
            return self._end(self._text[self._at :])
        return self._as_text(tag.end)
