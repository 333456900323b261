"""hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from jaxengine.frontend.tools.base import Parser
from jaxengine.frontend.tools.json_call import JsonCall
from jaxengine.frontend.tools.tagged import TaggedCalls

BEGIN, END = "<tool_call>", "</tool_call>"


def hermes() -> Parser:
    return TaggedCalls((BEGIN,), END, lambda first: JsonCall() if first == "{" else None)
