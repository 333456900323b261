"""qwen3: the calls of hermes, or between the same tags (or without them) those of Qwen3-Coder."""

from __future__ import annotations

from jaxengine.frontend.tools.base import CallParser, Parser
from jaxengine.frontend.tools.calls import Calls, Format, Where
from jaxengine.frontend.tools.hermes import BEGIN, END, json
from jaxengine.frontend.tools.schema import Tools
from jaxengine.frontend.tools.xml_call import FUNCTION, XmlCall


def qwen3(tools: Tools) -> Parser:
    def reader(first: str, where: Where) -> CallParser | None:
        if first == "<":
            return XmlCall(tools, (END,), where)
        return json(tools, first, where)

    return Calls(Format((BEGIN,), ("{", FUNCTION), (END,), reader, last=(FUNCTION,)))
