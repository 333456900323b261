"""From the pieces of an answer to content blocks, and to the events of a streamed message."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxengine.server.answer.pieces import Piece
from jaxengine.server.openai.bodies import UsageBody

_encode = msgspec.json.Encoder().encode

_BLOCKS = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Writer:
    """Puts a message together piece by piece; every call gives the events that tell of it, as bytes
    ready to be sent. `message` is whole after `end`."""

    def __init__(self, message_id: str, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None),
        }
        self._block: dict[str, Any] | None = None  # the one being written
        self._call = -1  # its number among the calls
        self._texts: list[str] = []

    def start(self, usage: UsageBody | None) -> bytes:
        """The first events."""
        self.message["usage"] = _usage(usage)
        return event("message_start", message=self.message) + event("ping")

    def add(self, piece: Piece) -> bytes:
        events = b""
        kind = _BLOCKS[piece.kind]
        same_call = piece.kind != "call" or piece.call == self._call
        if self._block is None or self._block["type"] != kind or not same_call:
            events = self._close() + self._open(kind, piece)
        if piece.text:
            self._texts.append(piece.text)
            events += self._delta(kind, piece.text)
        return events

    def end(self, finish_reason: str | None, stop_reason: Any, usage: UsageBody | None) -> bytes:
        """The last events, after the chat's finish_reason and the stop string that was met."""
        events = self._close()
        reason = _REASONS.get(finish_reason or "", "end_turn")
        stop = stop_reason if finish_reason == "stop" and isinstance(stop_reason, str) else None
        ending = {
            "stop_reason": reason if stop is None else "stop_sequence",
            "stop_sequence": stop,
        }
        self.message |= ending
        self.message["usage"] = _usage(usage)
        events += event("message_delta", delta=ending, usage=self.message["usage"])
        return events + event("message_stop")

    def _open(self, kind: str, piece: Piece) -> bytes:
        block: dict[str, Any] = {"type": kind}
        if kind == "tool_use":
            block |= {"id": piece.call_id, "name": piece.name, "input": {}}
        elif kind == "thinking":
            block |= {"thinking": "", "signature": ""}
        else:
            block["text"] = ""
        self._block, self._call, self._texts = block, piece.call, []
        self.message["content"].append(block)
        return event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, text: str) -> bytes:
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": text}
        elif kind == "thinking":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        block, text = self._block, "".join(self._texts)
        if block is None:
            return b""
        self._block = None
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        return event("content_block_stop", index=self._index)

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1


def event(kind: str, **fields: Any) -> bytes:
    body = _encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _arguments(text: str) -> dict[str, Any]:
    """A call's input as an object. What is none (a call that was cut off) is kept as text."""
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return {"_unparsed": text}
    return value if isinstance(value, dict) else {"_unparsed": text}


def _usage(usage: UsageBody | None) -> dict[str, int]:
    """Anthropic counts tokens that were found in the cache apart."""
    if usage is None:
        prompt = cached = completion = 0
    else:
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
