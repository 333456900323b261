"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as chat completions in other
words. Every error of these routes has Anthropic's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from msgspec.json import encode
from starlette.responses import Response

from jaxengine.front.async_llm import off_loop
from jaxengine.server.answer.pieces import chat_body, count_prompt, pieces_of, renamed
from jaxengine.server.anthropic.body import FIELD_NAMES, CountBody, MessagesBody, chat_fields
from jaxengine.server.anthropic.errors import PATH, anthropic_error, anthropic_error_body
from jaxengine.server.anthropic.events import Writer
from jaxengine.server.errors import ApiError, ClientGone, to_api_error
from jaxengine.server.openai.bodies import UsageBody
from jaxengine.server.openai.chat import ChatStream, open_chat, run_chat
from jaxengine.server.openapi import AnthropicErrorBody, answers, streamed
from jaxengine.server.sse import sse_response
from jaxengine.server.state import body_size, check_model, engine_of, request_id_of, state_of

_USAGE = {"include_usage": True, "continuous_usage_stats": True}


class _Route(APIRoute):
    """Answers what a handler raises, and what its body's fields are refused for."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            request_id = request_id_of(request)
            try:
                response: Response = await handle(request)
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001 - one request's; unknown ones are logged
                return anthropic_error(to_api_error(error), request_id)
            response.headers["request-id"] = request_id
            return response

        return answered


router = APIRouter(route_class=_Route)


@router.post(
    PATH,
    response_model=None,
    responses=streamed(400, 404, 413, 503, body=AnthropicErrorBody),
)
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    model = check_model(request, body.model)
    fields = await off_loop(body_size(request), lambda: chat_fields(body))
    if state_of(request).config.server.reasoning_parser is None:
        fields.pop("thinking_token_budget", None)  # clients send one to models that do not think
    with renamed(FIELD_NAMES):
        if body.stream:
            chat = chat_body({**fields, "stream": True, "stream_options": _USAGE})
            stream = await open_chat(chat, request, "msg_")
            events = _events(Writer(stream.id, model), stream, request_id_of(request))
            return await sse_response(request, events, stream.close)
        whole = await run_chat(chat_body(fields), request, "msg_")
    choice = whole.choices[0]
    _raise_if_aborted(choice.finish_reason)
    writer = Writer(whole.id, model)
    for piece in pieces_of(choice.message):
        writer.add(piece)
    writer.end(choice.finish_reason, choice.stop_reason, whole.usage)
    return Response(encode(writer.message), media_type="application/json")


@router.post(
    f"{PATH}/count_tokens",
    response_model=None,
    responses=answers(400, 404, 413, 503, body=AnthropicErrorBody),
)
async def count(body: CountBody, request: Request) -> Response:
    """How many tokens the conversation's prompt has."""
    engine = engine_of(request)
    check_model(request, body.model)
    fields = await off_loop(body_size(request), lambda: chat_fields(body))
    with renamed(FIELD_NAMES):
        tokens = await count_prompt(chat_body(fields), engine)
    return Response(encode({"input_tokens": tokens}), media_type="application/json")


async def _events(writer: Writer, stream: ChatStream, request_id: str) -> AsyncGenerator[bytes]:
    """The events as the chat comes. An error before the first of them is raised; later it becomes
    the last event."""
    finish, stop, used, started = None, None, None, False
    try:
        async for chunks in stream.chunks:
            events = b""
            for chunk in chunks:
                if isinstance(chunk.usage, UsageBody):
                    used = chunk.usage
                if not started:
                    events, started = writer.start(used), True
                for choice in chunk.choices:
                    if choice.finish_reason is not None:
                        finish, stop = choice.finish_reason, choice.stop_reason
                    for piece in pieces_of(choice.delta):
                        events += writer.add(piece)
            if events:
                yield events
        _raise_if_aborted(finish)
        yield writer.end(finish, stop, used)
    except Exception as error:  # noqa: BLE001 - the 200 is sent; the stream must say so itself
        if not started:
            raise
        body = anthropic_error_body(to_api_error(error), request_id)
        yield b"event: error\ndata: " + body + b"\n\n"


def _raise_if_aborted(finish_reason: str | None) -> None:
    if finish_reason not in ("stop", "length", "tool_calls"):
        raise ApiError(500, "the answer was aborted")
