"""qwen3: the calls of hermes, or between the same tags (or without them) those of Qwen3-Coder."""

from __future__ import annotations

from jaxengine.text.tools.base import CallParser, Parser
from jaxengine.text.tools.calls import Calls, Format, Where
from jaxengine.text.tools.hermes import BEGIN, END, json
from jaxengine.text.tools.schema import Tools
from jaxengine.text.tools.xml_call import FUNCTION, XmlCall


def qwen3(tools: Tools) -> Parser:
    def reader(first: str, where: Where) -> CallParser | None:
        if first == "<":
            return XmlCall(tools, (END,), where)
        return json(tools, first, where)

    return Calls(Format((BEGIN,), ("{", FUNCTION), (END,), reader, last=(FUNCTION,)))
