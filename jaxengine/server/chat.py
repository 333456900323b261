"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from jaxengine.engine.async_llm import AsyncLLM, Placement, RequestStream, off_loop
from jaxengine.frontend.chat_template import render_messages
from jaxengine.frontend.outputs import CompletionOutput, usage
from jaxengine.frontend.validation import RequestError
from jaxengine.sampling_params import SamplingParams
from jaxengine.server.errors import ApiError
from jaxengine.server.logprobs import chat_logprobs, prompt_logprobs_body
from jaxengine.server.protocol import (
    ChatBody,
    TokenizeBody,
    check_fields,
    logprobs_count,
    sampling_params,
)
from jaxengine.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Message,
    encode,
    usage_body,
)
from jaxengine.server.sse import DONE, event, sse_response
from jaxengine.server.state import body_size, check_model, engine_of, placement_of, request_id_of
from jaxengine.server.streams import admit, close_all, final_outputs, merged, unless_hangup

router = APIRouter()


@dataclass(frozen=True)
class _Call:
    """One call, after its fields were checked."""

    body: ChatBody
    params: SamplingParams
    echo: str  # text that goes out before the answer
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    engine = engine_of(request)
    call = await off_loop(body_size(request), lambda: _check(body, engine, request))
    placement = placement_of(request, body.data_parallel_rank, body.user)
    streams = await unless_hangup(request, _admit(call, engine, placement))
    if body.stream:
        return await sse_response(request, _chunks(call, streams[0]), close_all(streams))
    try:
        (final,) = await unless_hangup(request, final_outputs(streams))
    finally:
        close_all(streams)()
    whole = ChatCompletion(
        call.id,
        call.created,
        call.model,
        [_choice(call, output) for output in final.outputs],
        usage_body(usage([final])),
    )
    if body.return_token_ids:
        whole.prompt_token_ids = final.prompt_token_ids
    if body.prompt_logprobs is not None:
        whole.prompt_logprobs = prompt_logprobs_body(final.prompt_logprobs)
    return Response(encode(whole), media_type="application/json")


def _check(body: ChatBody, engine: AsyncLLM, request: Request) -> _Call:
    model = check_model(request, body.model)
    check_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, name = body.max_tokens, "max_tokens"
    if max_tokens is not None and not max_tokens >= 1:
        raise ApiError(400, f"{name} must be at least 1, got {max_tokens}", param=name)
    more: dict[str, Any] = {"max_tokens": max_tokens}
    if body.logprobs:
        more["logprobs"] = 0 if body.top_logprobs is None else body.top_logprobs
    params = sampling_params(body, engine.default_params, **more)
    echo = ""
    if body.echo and body.messages and body.messages[-1].get("role") == "assistant":
        content = body.messages[-1].get("content")
        echo = content if isinstance(content, str) else ""
    return _Call(body, params, echo, f"chatcmpl-{request_id_of(request)}", model)


async def _admit(call: _Call, engine: AsyncLLM, placement: Placement) -> list[RequestStream]:
    body = call.body
    text = await render(body, engine)
    prompt = {"prompt": text, "add_special_tokens": bool(body.add_special_tokens)}
    try:
        return await admit(engine, [prompt], call.params, call.id, body, placement)
    except RequestError as error:  # the client wrote messages and top_logprobs
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if error.field == "max_tokens" and body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        raise RequestError(names.get(error.field, error.field), error.message) from None


async def render(body: ChatBody | TokenizeBody, engine: AsyncLLM) -> str:
    """The conversation as text, by the model's template. Raises ApiError 400, ChatTemplateError."""
    messages = body.messages
    if not messages:
        raise ApiError(400, "messages must not be empty", param="messages")
    template = engine.chat_template
    if body.chat_template is not None:
        if not engine.config.model.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template in requests is refused (--trust-request-chat-template allows it)",
                param="chat_template",
            )
        template = body.chat_template
    tokenizer = engine.tokenizer
    if template is None or tokenizer is None:
        raise ApiError(400, "the model has no chat template; use /v1/completions", param="messages")
    continues = bool(body.continue_final_message)
    generation_prompt = body.add_generation_prompt
    if generation_prompt and continues:
        raise ApiError(
            400,
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    if generation_prompt is None:
        generation_prompt = not continues
    options = dict(body.chat_template_kwargs or {})
    reserved = {"messages", "tools", "add_generation_prompt", "continue_final_message"} & set(
        options
    )
    if reserved:
        name = sorted(reserved)[0]
        raise ApiError(
            400, f"chat_template_kwargs must not hold {name}", param="chat_template_kwargs"
        )
    if isinstance(body, ChatBody) and body.documents is not None:
        options["documents"] = body.documents

    def work() -> str:
        return render_messages(
            template,
            messages,
            add_generation_prompt=generation_prompt,
            continue_final_message=continues,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **options,
        )

    size = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str | list))
    return await off_loop(size + 100 * len(messages), work)


def _logprobs(call: _Call, output: CompletionOutput) -> ChatLogprobs | None:
    if output.logprobs is None:
        return None
    count = logprobs_count(call.body.top_logprobs or 0)
    as_ids = bool(call.body.return_tokens_as_token_ids)
    return chat_logprobs(output.logprobs, output.token_ids, count, as_ids)


def _choice(call: _Call, output: CompletionOutput) -> ChatChoice:
    return ChatChoice(
        output.index,
        Message(call.echo + output.text),
        _logprobs(call, output),
        output.finish_reason,
        output.stop_reason,
        output.token_ids if call.body.return_token_ids else UNSET,
    )


async def _chunks(call: _Call, stream: RequestStream) -> AsyncGenerator[bytes]:
    """For each choice: a chunk with the role, its deltas, the last of them with finish_reason."""
    body = call.body
    options = body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    continuous = with_usage and bool(options and options.continuous_usage_stats)
    greeted: set[int] = set()
    chunk = ChatChunk(call.id, call.created, call.model, [])
    if with_usage and not continuous:
        chunk.usage = None
    async for [(_, output)], done in merged([stream]):
        events = []
        if continuous:
            chunk.usage = usage_body(usage([output]))
        for new in output.outputs:
            if new.index not in greeted:
                first = not greeted
                greeted.add(new.index)
                chunk.choices = [ChatChunkChoice(new.index, Delta("assistant", call.echo))]
                if body.return_token_ids and first:
                    chunk.prompt_token_ids = output.prompt_token_ids
                events.append(event(encode(chunk)))
                chunk.prompt_token_ids = UNSET
            if not (new.text or new.finish_reason or new.logprobs or body.return_token_ids):
                continue  # text held back: half a character, or the start of a stop string
            choice = ChatChunkChoice(
                new.index, Delta(content=new.text), _logprobs(call, new), new.finish_reason
            )
            if new.finish_reason is not None:
                choice.stop_reason = new.stop_reason
            if body.return_token_ids:
                choice.token_ids = new.token_ids
            chunk.choices = [choice]
            events.append(event(encode(chunk)))
        if done:
            if with_usage:
                chunk.choices = []
                chunk.usage = usage_body(usage([output]))
                events.append(event(encode(chunk)))
            events.append(DONE)
        if events:
            yield b"".join(events)
