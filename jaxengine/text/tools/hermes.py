"""hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import re

from jaxengine.text.tools.base import CallParser, Parser
from jaxengine.text.tools.calls import Calls, Format, Where
from jaxengine.text.tools.json_call import JsonCall, JsonCalls, Strictness
from jaxengine.text.tools.marks import Marks
from jaxengine.text.tools.schema import Tools

BEGIN, END = "<tool_call>", "</tool_call>"
MARKS = Marks(
    (END, BEGIN),
    re.compile(r'(?:</tool_call>\s*)?(?:<tool_call>\s*)+\{\s*"\w+"\s*:'),
)


def hermes(tools: Tools) -> Parser:
    return Calls(Format((BEGIN,), ("{",), (END,), lambda first, where: json(tools, first, where)))


def json(tools: Tools, first: str, where: Where) -> CallParser | None:
    """Behind a tag any name is a call's. Without one, the answer must begin with a call of one of
    the request's functions, with arguments."""
    if not where.tagged and not where.first:
        return None
    strictness = Strictness.ANY_NAME if where.tagged else Strictness.WITH_ARGUMENTS
    if where.thoughts:
        strictness = Strictness.DECLARED
    if first == "{":
        return JsonCall(tools, strictness, marks=MARKS)
    return JsonCalls(tools, strictness, MARKS) if first == "[" and where.tagged else None
