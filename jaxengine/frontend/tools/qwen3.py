"""qwen3: the calls of hermes, or those of Qwen3-Coder:

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.frontend.tools.base import CallParser, Event, Parser
from jaxengine.frontend.tools.hermes import BEGIN, END
from jaxengine.frontend.tools.json_call import JsonCall
from jaxengine.frontend.tools.tagged import TaggedCalls

_FUNCTION = "<function="
_END = "</parameter>"


def qwen3(tools: Sequence[Mapping[str, Any]]) -> Parser:
    """`tools` as in the request: their schemas say what the untyped values are."""

    def reader(first: str) -> CallParser | None:
        if first == "{":
            return JsonCall()
        return XmlCall(tools) if first == "<" else None

    return TaggedCalls((BEGIN,), END, reader, bare=(_FUNCTION,))


class XmlCall:
    """A parameter is passed on once it is complete."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self._tools = tools
        self._properties: Mapping[str, Any] = {}
        self._buffer = ""
        self._scanned = 0  # so much of the buffer holds no end of a parameter
        self._count = 0

    def feed(self, text: str, out: list[Event]) -> str:
        self._buffer += text
        while not (self.done or self.failed) and self._step(out):
            continue
        return self._buffer if self.done or self.failed else ""

    def _step(self, out: list[Event]) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self.started:
            return self._name(out)
        if "</function>".startswith(self._buffer[: len("</function>")]):
            if len(self._buffer) < len("</function>"):
                return False
            self._buffer = self._buffer[len("</function>") :]
            out.append(Event("arguments", "}" if self._count else "{}"))
            self.done = True
            return False
        return self._parameter(out)

    def _name(self, out: list[Event]) -> bool:
        if not _FUNCTION.startswith(self._buffer[: len(_FUNCTION)]):
            self.failed = True
            return False
        end = self._buffer.find(">")
        if end < 0 or len(self._buffer) < len(_FUNCTION):
            return False
        name = self._buffer[len(_FUNCTION) : end].strip()
        self.failed = not name
        if name:
            self.started = True
            self._properties = _properties(self._tools, name)
            out.append(Event("call", name))
        self._buffer = self._buffer[end + 1 :]
        return True

    def _parameter(self, out: list[Event]) -> bool:
        begin = "<parameter="
        if not begin.startswith(self._buffer[: len(begin)]):
            self.failed = True
            return False
        if self._buffer.find(_END, max(0, self._scanned - len(_END))) < 0:
            self._scanned = len(self._buffer)
            return False
        self._scanned = 0
        key, closed, rest = self._buffer[len(begin) :].partition(">")
        value, ended, after = rest.partition(_END)
        if not (closed and ended):
            return False
        value = value.removeprefix("\n").removesuffix("\n")
        shown = json.dumps(typed(value, self._properties.get(key.strip())), ensure_ascii=False)
        lead = ", " if self._count else "{"
        out.append(Event("arguments", f"{lead}{json.dumps(key.strip())}: {shown}"))
        self._count += 1
        self._buffer = after
        return True


def _properties(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """The value that `text` stands for: what it is as JSON if the schema has a type other than
    string and the text is JSON, else the text itself."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    allowed = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if isinstance(schema, Mapping) and not allowed:
        parts = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
        allowed = [p["type"] for p in parts if isinstance(p, Mapping) and "type" in p]
        if not allowed and ("$ref" in schema or "properties" in schema or "items" in schema):
            allowed = ["object"]
    if not allowed or allowed == ["string"]:
        return text
    stripped = text.strip()
    if stripped.lower() in ("true", "false") and "boolean" in allowed:
        return stripped.lower() == "true"
    if stripped.lower() in ("null", "none") and "null" in allowed:
        return None
    if "string" in allowed and not stripped.startswith(("{", "[")):
        return text
    try:
        return json.loads(stripped)
    except ValueError:
        return text


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
