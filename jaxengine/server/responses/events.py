"""From the pieces of an answer to output items, and to the events of a streamed response."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from jaxengine.server.answer.pieces import Piece
from jaxengine.server.errors import ApiError

_encode = msgspec.json.Encoder().encode

_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}
_LAST_EVENTS = {"completed": "completed", "failed": "failed"}  # all others: "incomplete"


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class Writer:
    """Puts a response together piece by piece; every call gives the events that tell of it, as
    bytes ready to be sent. `response` is the response object, up to date after each call but for
    the text of the item that is being written."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._sequence = 0
        self._item: dict[str, Any] | None = None  # the one being written
        self._at: dict[str, Any] = {}  # its id and place, as its events say them
        self._call = -1  # the number of the open item's call
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def start(self) -> bytes:
        """The first events."""
        self.response["status"] = "in_progress"
        return self._whole("created") + self._whole("in_progress")

    def add(self, piece: Piece) -> bytes:
        events = b""
        if not self._belongs(piece):
            events = self._close("completed") + self._open(piece)
        if piece.logprobs:
            self._logprobs += piece.logprobs
        if piece.text:
            self._texts.append(piece.text)
            events += self._delta(piece)
        return events

    def end(self, finish_reason: str | None, usage: dict[str, Any] | None) -> bytes:
        """The last events, after the chat's finish_reason."""
        self.response["usage"] = usage
        status = _STATUS.get(finish_reason or "", "failed")
        if status == "failed":
            return self.fail(ApiError(500, "the response was aborted"))
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        events = b""
        if self._item is None and not self.response["output"]:
            events = self._open(Piece("text", ""))  # the model said nothing: an empty message
        return events + self._close(status) + self._finish(status)

    def fail(self, error: ApiError) -> bytes:
        """The last events of a response that broke off."""
        self.response["error"] = {"code": "server_error", "message": error.message}
        return self._close("incomplete") + self._finish("failed")

    def cancel(self) -> bytes:
        """The last events of a response that its client cancelled. The API has no event of that
        name: the status inside says it."""
        return self._close("incomplete") + self._finish("cancelled")

    # -- items -----------------------------------------------------------------------------------

    def _belongs(self, piece: Piece) -> bool:
        kinds = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
        if self._item is None or self._item["type"] != kinds[piece.kind]:
            return False
        return piece.kind != "call" or piece.call == self._call

    def _open(self, piece: Piece) -> bytes:
        item: dict[str, Any]
        if piece.kind == "call":
            item = {
                "id": new_id("fc"),
                "type": "function_call",
                "call_id": piece.call_id or new_id("call"),
                "name": piece.name,
                "arguments": "",
            }
        elif piece.kind == "reasoning":
            item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
        else:
            item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._item, self._call, self._texts, self._logprobs = item, piece.call, [], []
        self.response["output"].append(item)
        index = len(self.response["output"]) - 1
        self._at = {"item_id": item["id"], "output_index": index}
        events = self._event("output_item.added", output_index=index, item=item)
        if piece.kind != "call":
            events += self._part("added", self._content(""))
        return events

    def _delta(self, piece: Piece) -> bytes:
        if piece.kind == "call":
            return self._event("function_call_arguments.delta", **self._at, delta=piece.text)
        if piece.kind == "reasoning":
            return self._event(
                "reasoning_text.delta", **self._at, content_index=0, delta=piece.text
            )
        return self._event(
            "output_text.delta",
            **self._at,
            content_index=0,
            delta=piece.text,
            logprobs=piece.logprobs or [],
        )

    def _close(self, status: str) -> bytes:
        item = self._item
        if item is None:
            return b""
        text = "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = text
            events = self._event(
                "function_call_arguments.done", **self._at, name=item["name"], arguments=text
            )
        else:
            content = self._content(text)
            item["content"] = [content]
            if item["type"] == "reasoning":
                events = self._event("reasoning_text.done", **self._at, content_index=0, text=text)
            else:
                events = self._event(
                    "output_text.done",
                    **self._at,
                    content_index=0,
                    text=text,
                    logprobs=self._logprobs,
                )
            events += self._part("done", content)
        item["status"] = status
        index = self._at["output_index"]
        events += self._event("output_item.done", output_index=index, item=item)
        self._item = None
        return events

    def _content(self, text: str) -> dict[str, Any]:
        if self._item is not None and self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._logprobs,
        }

    # -- events ----------------------------------------------------------------------------------

    def _part(self, what: str, part: dict[str, Any]) -> bytes:
        return self._event(f"content_part.{what}", **self._at, content_index=0, part=part)

    def _finish(self, status: str) -> bytes:
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return self._whole(_LAST_EVENTS.get(status, "incomplete"))

    def _whole(self, name: str) -> bytes:
        return self._event(name, response=self.response)

    def _event(self, event: str, /, **fields: Any) -> bytes:
        kind = f"response.{event}"
        body = _encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
