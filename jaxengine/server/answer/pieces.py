"""A chat answer as a row of pieces: reasoning, text, tool calls. `/v1/responses` and `/v1/messages`
are chat completions in other words; both build their answers from these."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from jaxengine.front.async_llm import AsyncLLM, off_loop
from jaxengine.server.answer.render import render
from jaxengine.server.answer.tools import tool_choice
from jaxengine.server.errors import ApiError, to_api_error
from jaxengine.server.openai.bodies import ChatLogprob, ChatLogprobs, Delta, Message
from jaxengine.server.openai.protocol import SAMPLING, ChatBody
from jaxengine.server.state import check_length
from jaxengine.text.chat_template import ChatTemplateError
from jaxengine.validation import RequestError

# fields beyond those of the two APIs, taken as in chat completions
SAMPLING_FIELDS = (
    *(name for name in SAMPLING if name not in ("n", "temperature", "top_p", "prompt_logprobs")),
    "structured_outputs",
    "session_id",
    "request_id",
    "include_reasoning",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
    "data_parallel_rank",
)

Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True)
class Piece:
    """Some text of one part of the answer. A call's first piece carries its id and name."""

    kind: Kind
    text: str
    logprobs: list[ChatLogprob] | None = None
    call: int = 0  # which of the calls
    call_id: str = ""
    name: str = ""


def pieces_of(part: Message | Delta, logprobs: ChatLogprobs | None = None) -> list[Piece]:
    """The pieces of a whole message, or of a delta, in the order in which they are shown."""
    found: list[Piece] = []
    reasoning, text = part.reasoning_content, part.content
    if isinstance(reasoning, str) and reasoning:
        found.append(Piece("reasoning", reasoning))
    if isinstance(text, str) and (text or logprobs):
        found.append(Piece("text", text, None if logprobs is None else logprobs.content))
    calls = part.tool_calls
    for i, call in enumerate(calls if isinstance(calls, list) else ()):
        index = call.index if isinstance(call.index, int) else i
        name, arguments, call_id = call.function.name, call.function.arguments, call.id
        found.append(
            Piece(
                "call",
                arguments if isinstance(arguments, str) else "",
                call=index,
                call_id=call_id if isinstance(call_id, str) else "",
                name=name if isinstance(name, str) else "",
            )
        )
    return found


def sampling_extras(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of a body's further fields that chat completions know."""
    return {name: (extra or {})[name] for name in SAMPLING_FIELDS if name in (extra or {})}


def chat_body(fields: Mapping[str, Any]) -> ChatBody:
    """A chat request. Raises RequestValidationError as for one that came over HTTP."""
    try:
        return ChatBody.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about the chat request, in terms of the fields that the client wrote: `names` maps
    the chat's field to the client's."""

    def told(field: str, message: str) -> str:
        for name, theirs in names.items():
            if name == field or "_" in name:  # the others are words of any sentence too
                message = re.sub(rf"\b{re.escape(name)}\b", theirs, message)
        return message

    try:
        yield
    except RequestError as error:
        if error.field not in names:
            raise
        if error.code is not None:  # its words are known to clients
            raise RequestError(names[error.field], error.message, error.code) from None
        raise RequestError(names[error.field], told(error.field, error.message)) from None
    except ChatTemplateError as error:
        raise ApiError(400, told("messages", str(error)), param=names["messages"]) from None
    except (ApiError, RequestValidationError) as problem:
        refusal = to_api_error(problem)
        field = refusal.param
        if field is None or field not in names:
            raise
        message = told(field, refusal.message)
        raise ApiError(refusal.status, message, param=names[field], code=refusal.code) from None


async def count_prompt(body: ChatBody, engine: AsyncLLM) -> int:
    """Tokens of the prompt that the conversation and its tools make. Raises ApiError 400,
    ChatTemplateError."""
    tools = tool_choice(body, engine.config.server)
    text = await render(body, engine, tools.shown)
    check_length(text, engine, "messages")
    return await count_tokens(text, engine, special=bool(body.add_special_tokens))


async def count_tokens(text: str, engine: AsyncLLM, *, special: bool = False) -> int:
    """Tokens of a text; 0 without a tokenizer."""
    tokenizer = engine.tokenizer
    if tokenizer is None or not text:
        return 0
    ids = await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))
    return len(ids)
