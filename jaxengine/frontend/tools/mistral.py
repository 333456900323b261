"""mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or, since Mistral Small 3.1,
[TOOL_CALLS]NAME{...} or [TOOL_CALLS]NAME[ARGS]{...} for each call."""

from __future__ import annotations

from jaxengine.frontend.tools.base import CallParser, Event, Parser
from jaxengine.frontend.tools.json_call import JsonCalls
from jaxengine.frontend.tools.nesting import Nesting
from jaxengine.frontend.tools.tagged import TaggedCalls

BEGIN = "[TOOL_CALLS]"
ARGS = "[ARGS]"


def mistral() -> Parser:
    def reader(first: str) -> CallParser | None:
        if first == "[":
            return JsonCalls()
        return NamedObject() if first.isalnum() or first == "_" else None

    return TaggedCalls((BEGIN,), "</s>", reader)


class NamedObject:
    """NAME{...}: the name as it stands, then a JSON object, passed on as it is written."""

    def __init__(self) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self._name = ""
        self._object = Nesting("{")

    def feed(self, text: str, out: list[Event]) -> str:
        sent = 0
        for at, char in enumerate(text):
            if not self.started:
                sent = at
                self._take_name(char, out)
            else:
                self.done = not self._object.take(char)
            if self.failed:
                return text[at:]
            if self.done:
                out.append(Event("arguments", text[sent : at + 1]))
                return text[at + 1 :]
        if self.started and text[sent:]:
            out.append(Event("arguments", text[sent:]))
        return ""

    def _take_name(self, char: str, out: list[Event]) -> None:
        if char != "{":
            self._name += char
            self.failed = len(self._name) > 256
            return
        name = self._name.strip().removesuffix(ARGS).strip()
        if not name or any(c in " \n[]" for c in name):
            self.failed = True
            return
        self.started = True
        out.append(Event("call", name))
