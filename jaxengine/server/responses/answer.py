"""One answer of the Responses API, from chat to response object, in the foreground or alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from msgspec.json import encode

from jaxengine.front.async_llm import AsyncLLM
from jaxengine.server.answer.pieces import Piece, count_tokens, pieces_of
from jaxengine.server.errors import ApiError, to_api_error
from jaxengine.server.openai.bodies import UsageBody
from jaxengine.server.openai.chat import ChatStream
from jaxengine.server.responses.body import ResponsesBody
from jaxengine.server.responses.events import Writer, new_id
from jaxengine.server.responses.input import Message, to_messages
from jaxengine.server.responses.store import Job, ResponseStore, Stored


@dataclass
class Answer:
    """An answer under way."""

    body: ResponsesBody
    engine: AsyncLLM
    store: ResponseStore
    messages: list[Message]  # the conversation before the answer, without instructions
    writer: Writer
    reasoning: list[str] = field(default_factory=list)

    def add(self, piece: Piece) -> bytes:
        if piece.kind == "reasoning":
            self.reasoning.append(piece.text)
        return self.writer.add(piece)

    async def end(self, finish_reason: str | None, usage: UsageBody | None) -> bytes:
        thought = await count_tokens("".join(self.reasoning), self.engine)
        return self.writer.end(finish_reason, _usage(usage, thought))

    def stored(self) -> Stored:
        """As it is now; a call that was cut off cannot go into a conversation."""
        output = [
            item
            for item in self.writer.response["output"]
            if item["status"] == "completed" or item["type"] != "function_call"
        ]
        messages = [*self.messages, *(to_messages(output, self.messages) if output else ())]
        return Stored(self.writer.response, messages)

    def keep(self) -> None:
        """Store what is not stored already."""
        if self.body.stored and not self.body.background:
            self.store.put(self.stored())


def response_object(body: ResponsesBody, model: str, engine: AsyncLLM) -> dict[str, Any]:
    """The response object before there is an answer: the request's settings, as they are used."""
    reasoning, text, defaults = body.reasoning or {}, body.text or {}, engine.default_params
    made = {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.stored,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {
            "format": text.get("format") or {"type": "text"},
            "verbosity": text.get("verbosity") or "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
    try:
        encode(made)
    except (ValueError, OverflowError, RecursionError) as error:  # lone surrogates, huge numbers
        raise ApiError(400, f"the request cannot be repeated in its answer: {error}") from None
    return made


async def events_of(
    answer: Answer, stream: ChatStream, started: bool = False
) -> AsyncGenerator[bytes]:
    """The events as the chat comes, and the response stored at their end. An error before the first
    of them is raised; later it becomes the last event."""
    finish, used = None, None
    try:
        async for chunks in stream.chunks:
            events = b"" if started else answer.writer.start()
            started = True
            for chunk in chunks:
                if isinstance(chunk.usage, UsageBody):
                    used = chunk.usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    for piece in pieces_of(choice.delta, choice.logprobs):
                        events += answer.add(piece)
            if events:
                yield events
        events = await answer.end(finish, used)
    except Exception as error:  # noqa: BLE001 - the 200 is sent; the stream must say so itself
        if not started:
            raise
        events = answer.writer.fail(to_api_error(error))
    answer.keep()
    yield events


async def run_job(answer: Answer, stream: ChatStream, stored: Stored, job: Job) -> None:
    """Make a response in the background; a cancelled task leaves it cancelled."""
    try:
        _tell(stored, job, answer.writer.start())
        async for events in events_of(answer, stream, started=True):
            _tell(stored, job, events)
    except asyncio.CancelledError:
        _tell(stored, job, answer.writer.cancel())
    finally:
        stream.close()
        stored.messages = answer.stored().messages
        job.tell(b"", done=True)
        if answer.store.get(stored.id) is stored:
            answer.store.put(stored)  # its size has changed


def _tell(stored: Stored, job: Job, events: bytes) -> None:
    if stored.streamed:
        job.tell(events)


async def followed(job: Job, after: int) -> AsyncGenerator[bytes]:
    """The events of a job behind number `after`. They are numbered in their order from 0."""
    number = 0
    async for events in job.follow():
        found = events.split(b"\n\n")[:-1]
        skip = max(0, after + 1 - number)
        number += len(found)
        if found[skip:]:
            yield b"\n\n".join(found[skip:]) + b"\n\n"


def _usage(usage: UsageBody | None, reasoning_tokens: int) -> dict[str, Any] | None:
    if usage is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": min(reasoning_tokens, usage.completion_tokens)
        },
        "total_tokens": usage.total_tokens,
    }
