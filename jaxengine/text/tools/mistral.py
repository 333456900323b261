"""mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or, since Mistral Small 3.1,
[TOOL_CALLS]NAME{...} or [TOOL_CALLS]NAME[ARGS]{...} for each call. The list is read without the
marker too, if the answer begins with it."""

from __future__ import annotations

import re

from jaxengine.text.tools.arguments import Arguments
from jaxengine.text.tools.base import CallParser, Event, Parser
from jaxengine.text.tools.calls import Calls, Format, Where
from jaxengine.text.tools.json_call import JsonCall, JsonCalls, Strictness
from jaxengine.text.tools.marks import Marks
from jaxengine.text.tools.schema import Tools

BEGIN = "[TOOL_CALLS]"
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
END = "</s>"
MARKS = Marks(
    (BEGIN, END),
    re.compile(
        r"(?:</s>\s*)?(?:\[TOOL_CALLS\]\s*)+"
        r'(?:\[\s*\{\s*"\w+"\s*:|[\w.:/\-]+\s*(?:\[[A-Z_]+\][\w\-]*)*\s*\{\s*"\w+"\s*:)'
    ),
)
_NAME = re.compile(r"\s*([\w.:/\-]{1,256})\s*(?:\[(?:ARGS|CALL_ID)\]\s*[\w\-]{0,64}\s*)*(?=\{)")
_LONGEST_NAME = 600  # with what stands between it and the arguments
_BEGUN = re.compile(
    r"\s*[\w.:/\-]*\s*(?:\[(?:ARGS|CALL_ID)\]\s*[\w\-]*\s*)*"
    r"(?:\[(?:A(?:R(?:GS?)?)?|C(?:A(?:L(?:L(?:_(?:ID?)?)?)?)?)?)?)?"
)


def mistral(tools: Tools) -> Parser:
    def reader(first: str, where: Where) -> CallParser | None:
        if not where.tagged and not where.first:
            return None
        strictness = Strictness.ANY_NAME if where.tagged else Strictness.WITH_ARGUMENTS
        if where.thoughts:
            strictness = Strictness.DECLARED
        if first == "[":
            return JsonCalls(tools, strictness, MARKS)
        if first == "{" and where.tagged:
            return JsonCall(tools, strictness, marks=MARKS)
        named = where.tagged and (first.isalnum() or first == "_")
        return NamedObject(tools, where.thoughts) if named else None

    return Calls(Format((BEGIN,), ("[",), (END,), reader))


class NamedObject:
    """NAME{...}: the name as it stands, then the arguments."""

    def __init__(self, tools: Tools, declared: bool) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.broken = False
        self._tools = tools
        self._declared = declared  # it must be one of the request's functions
        self._text = ""
        self._arguments: Arguments | None = None

    def feed(self, text: str, out: list[Event]) -> str:
        if self._arguments is None:
            self._text += text
            match = _NAME.match(self._text)
            if match is None:
                if len(self._text) > _LONGEST_NAME or _BEGUN.fullmatch(self._text) is None:
                    self.failed = True
                    return self._text
                return ""
            name = self._tools.find(match[1])
            if name is None and self._declared:
                self.failed = True
                return self._text
            name = name or match[1]
            self.started = True
            out.append(Event("call", name))
            self._arguments = Arguments(self._tools.shape(name), marks=MARKS)
            text = self._text[match.end() :]
        self._give(self._arguments.feed(text), out)
        self.done = self._arguments.done
        return self._arguments.rest if self.done else ""

    def finish(self, out: list[Event]) -> str:
        if self._arguments is None:
            self.failed = True
            return ""
        self._give(self._arguments.finish(), out)
        self.done = True
        return self._arguments.rest

    def _give(self, text: str, out: list[Event]) -> None:
        if text:
            out.append(Event("arguments", text))
