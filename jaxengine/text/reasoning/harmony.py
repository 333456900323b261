"""gpt-oss: messages with a header that names their channel or the function they go to.

<|channel|>analysis<|message|>...<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with <|start|>assistant, so that an answer begins inside a header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.text.reasoning.channels import Channels
from jaxengine.text.tools.arguments import Arguments
from jaxengine.text.tools.base import Event, Kind
from jaxengine.text.tools.schema import Tools

MESSAGE = "<|message|>"
FINAL = "<|channel|>final<|message|>"  # begins an answer without reasoning


class Harmony:
    """`inside`: the prompt has the header of the final message already. `tools` as in the request:
    messages to one of them are calls, whatever else their header says. What stands behind a call's
    arguments in its message is reasoning."""

    def __init__(self, inside: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tools = Tools(tools)
        self._channels = Channels(inside, self._tools)
        self._arguments: Arguments | None = None
        self._empty = True  # nothing of this message was passed on
        self._seen: set[Kind] = set()

    def feed(self, text: str) -> list[Event]:
        out: list[Event] = []
        for kind, piece, name in self._channels.push(text):
            self._take(kind, piece, name, out)
        return out

    def finish(self) -> list[Event]:
        out: list[Event] = []
        for kind, piece, name in self._channels.finish():
            self._take(kind, piece, name, out)
        self._end_call(out)
        return out

    def _take(self, kind: str, text: str, name: str, out: list[Event]) -> None:
        if kind == "mark":
            self._end_call(out)
            self._empty = True
            if name:
                out.append(Event("call", name))
                self._arguments = Arguments(self._tools.shape(name))
        elif kind == "arguments":
            self._argument_text(text, out)
        else:
            self._pass_on("content" if kind == "content" else "reasoning", text, out)

    def _argument_text(self, text: str, out: list[Event]) -> None:
        reader = self._arguments
        if reader is None:
            return
        if not reader.done:
            given = reader.feed(text)
            if given:
                out.append(Event("arguments", given))
            text = reader.rest if reader.done else ""
        self._pass_on("reasoning", text.lstrip() if self._empty else text, out)

    def _end_call(self, out: list[Event]) -> None:
        reader, self._arguments = self._arguments, None
        if reader is not None and not reader.done:
            given = reader.finish()
            if given:
                out.append(Event("arguments", given))
            self._pass_on("reasoning", reader.rest.strip(), out)

    def _pass_on(self, kind: Kind, text: str, out: list[Event]) -> None:
        if not text:
            return
        if self._empty and kind in self._seen:
            text = "\n" + text  # messages of one kind become one text
        self._empty = False
        self._seen.add(kind)
        out.append(Event(kind, text))
