"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from jaxengine.front.async_llm import RequestStream
from jaxengine.server.answer.answers import Answer
from jaxengine.server.openai import legacy_functions
from jaxengine.server.openai.bodies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Message,
    UsageBody,
    encode,
    usage_body,
)
from jaxengine.server.openai.chat_call import ChatCall, as_written, chat_call
from jaxengine.server.openai.logprobs import chat_logprobs, prompt_logprobs_body
from jaxengine.server.openai.protocol import ChatBody, logprobs_count
from jaxengine.server.openapi import reference, streamed
from jaxengine.server.sse import DONE, event, sse_response
from jaxengine.server.state import Visit, visit_of
from jaxengine.server.streams import admit, close_all, final_outputs, merged, unless_hangup
from jaxengine.text.outputs import CompletionOutput, usage
from jaxengine.validation import RequestError

router = APIRouter()


@dataclass(frozen=True)
class ChatStream:
    """An answer under way. `chunks` gives what came together as one list, the last of each choice
    with its finish_reason; then, with stream_options.include_usage, one without choices that has
    the usage. `close` must be called at the end, however it comes; the request is aborted if it
    still runs. Iterating raises ApiError for what the engine ended with an error."""

    id: str
    model: str
    created: int
    chunks: AsyncIterator[list[ChatChunk]]
    close: Callable[[], None]


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses=streamed(400, 404, 413, 503, schema=reference(ChatCompletion)),
)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    if not body.stream:
        whole = await run_chat(body, request)
        return Response(encode(whole), media_type="application/json")
    call, (stream,) = await _start(body, request, "chatcmpl-")
    return await sse_response(request, _events(call, stream), stream.close)


async def run_chat(body: ChatBody, request: Request, prefix: str = "chatcmpl-") -> ChatCompletion:
    """The whole answer; its id is `prefix` and the request's id. Raises ApiError, RequestError,
    ChatTemplateError and what `AsyncLLM.add` does; ClientGone when the client hangs up."""
    if body.stream:
        body = body.model_copy(update={"stream": False, "stream_options": None})
    call, streams = await _start(body, request, prefix)
    try:
        (final,) = await unless_hangup(request, final_outputs(streams, call.constraint_name))
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
    if body.return_prompt_text:
        whole.prompt_text = final.prompt
    if body.prompt_logprobs is not None:
        whole.prompt_logprobs = prompt_logprobs_body(final.prompt_logprobs)
    return whole


async def open_chat(body: ChatBody, request: Request, prefix: str = "chatcmpl-") -> ChatStream:
    """The answer as it comes, once the engine has taken the request. Raises as `run_chat`."""
    if not body.stream:
        body = body.model_copy(update={"stream": True})
    call, (stream,) = await _start(body, request, prefix)

    async def chunks() -> AsyncGenerator[list[ChatChunk]]:
        async for found, _ in _chunks(call, stream):
            yield found

    return ChatStream(call.id, call.model, call.created, chunks(), stream.close)


async def _start(
    body: ChatBody, request: Request, prefix: str
) -> tuple[ChatCall, list[RequestStream]]:
    visit = visit_of(request, body)
    with legacy_functions.errors_as_asked(body):
        return await unless_hangup(request, _admitted(body, visit, prefix))


async def _admitted(
    body: ChatBody, visit: Visit, prefix: str
) -> tuple[ChatCall, list[RequestStream]]:
    call = await chat_call(body, visit, prefix)
    prompts, field = [call.engine_prompt()], call.asked.field
    try:
        streams = await admit(
            visit.engine, prompts, call.params, call.id, call.body, visit.placement, field
        )
    except RequestError as error:
        raise as_written(error, call.body, call.asked) from None
    return call, streams


async def _events(call: ChatCall, stream: RequestStream) -> AsyncGenerator[bytes]:
    async for chunks, done in _chunks(call, stream):
        events = [event(encode(chunk)) for chunk in chunks]
        if done:
            events.append(DONE)  # with the last chunk: one write
        yield b"".join(events)


def _one_call_each(choice: ChatChunkChoice) -> list[ChatChunkChoice]:
    """With at most one call in a chunk, and none in the last: clients take a call for complete
    when they see what follows it."""
    calls = choice.delta.tool_calls
    if not calls or (len(calls) == 1 and choice.finish_reason is None):
        return [choice]
    choice.delta.tool_calls = calls[:1]
    made = [choice, *(ChatChunkChoice(choice.index, Delta(tool_calls=[c])) for c in calls[1:])]
    if choice.finish_reason is not None:
        last = ChatChunkChoice(choice.index, Delta(), None, choice.finish_reason)
        last.stop_reason = choice.stop_reason
        choice.finish_reason, choice.stop_reason = None, UNSET
        made.append(last)
    return made


def _logprobs(call: ChatCall, output: CompletionOutput) -> ChatLogprobs | None:
    if output.logprobs is None:
        return None
    count = logprobs_count(call.body.top_logprobs or 0)
    as_ids = bool(call.body.return_tokens_as_token_ids)
    return chat_logprobs(output.logprobs, output.token_ids, count, as_ids)


def _choice(call: ChatCall, output: CompletionOutput) -> ChatChoice:
    reason = output.finish_reason
    if call.style is None:
        message = Message("assistant", call.echo + output.text, None)
    else:
        answer = Answer(call.style)
        message = answer.message(output.text, call.echo)
        reason = answer.finish_reason(reason)
    if call.legacy:
        message = legacy_functions.message_with_function(message)
        reason = legacy_functions.finish_reason(reason)
    return ChatChoice(
        output.index,
        message,
        _logprobs(call, output),
        reason,
        output.stop_reason,
        output.token_ids if call.body.return_token_ids else UNSET,
    )


async def _chunks(
    call: ChatCall, stream: RequestStream
) -> AsyncGenerator[tuple[list[ChatChunk], bool]]:
    """For each choice: a chunk with the role, its deltas, the last of them with finish_reason.
    And whether these were the last."""
    body = call.body
    ends, continuous = call.usage
    greeted: dict[int, Answer | None] = {}
    usage_now: UsageBody | None | UnsetType = None if ends else UNSET

    def chunk(*choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(call.id, call.created, call.model, list(choices), usage=usage_now)

    async for [(_, output)], done in merged([stream], call.constraint_name):
        chunks = []
        if continuous:
            usage_now = usage_body(usage([output]))
        for new in output.outputs:
            if new.index not in greeted:
                first = chunk(ChatChunkChoice(new.index, Delta("assistant", call.echo)))
                if body.return_token_ids and not greeted:
                    first.prompt_token_ids = output.prompt_token_ids
                if body.return_prompt_text and not greeted:
                    first.prompt_text = output.prompt
                greeted[new.index] = None if call.style is None else Answer(call.style)
                chunks.append(first)
            answer, reason = greeted[new.index], new.finish_reason
            if answer is None:
                delta, empty = Delta(content=new.text), not new.text
            else:
                delta = answer.delta(new.text, reason is not None)
                empty, reason = delta == Delta(), answer.finish_reason(reason)
            if call.legacy:
                delta = legacy_functions.delta_with_function(delta)
                reason = legacy_functions.finish_reason(reason)
            if empty and not (reason or new.logprobs or body.return_token_ids):
                continue  # text held back: half a character, or the start of a stop string or tag
            choice = ChatChunkChoice(new.index, delta, _logprobs(call, new), reason)
            if new.finish_reason is not None:
                choice.stop_reason = new.stop_reason
            if body.return_token_ids:
                choice.token_ids = new.token_ids
            chunks += [chunk(c) for c in _one_call_each(choice)]
        if done and ends:
            usage_now = usage_body(usage([output]))
            chunks.append(chunk())
        if chunks or done:
            yield chunks, done
