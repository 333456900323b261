"""The routes of the Responses API: create, look up, cancel, delete. Each answer is a chat
completion in other words; those that may be asked for again live in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from msgspec.json import encode
from starlette.responses import Response

from jaxengine.front.async_llm import AsyncLLM, off_loop
from jaxengine.server.answer.pieces import chat_body, count_prompt, pieces_of, renamed
from jaxengine.server.errors import ApiError
from jaxengine.server.openai.chat import open_chat, run_chat
from jaxengine.server.openai.protocol import ChatBody
from jaxengine.server.openapi import answers, streamed
from jaxengine.server.responses.answer import (
    Answer,
    events_of,
    followed,
    response_object,
    run_job,
)
from jaxengine.server.responses.body import (
    FIELD_NAMES,
    ResponsesBody,
    chat_fields,
    check_body,
)
from jaxengine.server.responses.events import Writer
from jaxengine.server.responses.input import (
    Message,
    droppable,
    is_reference,
    to_messages,
    with_instructions,
    without,
)
from jaxengine.server.responses.store import Job, ResponseStore, Stored
from jaxengine.server.sse import sse_response
from jaxengine.server.state import body_size, check_model, engine_of
from jaxengine.server.streams import unless_hangup

router = APIRouter()


def install(app: FastAPI) -> None:
    """Add the routes, and the memory behind them."""
    app.state.responses = ResponseStore()
    app.include_router(router)


@router.post("/v1/responses", response_model=None, responses=streamed(400, 404, 413, 503))
async def create(body: ResponsesBody, request: Request) -> Response:
    """Answer an input: whole, streamed, or in the background."""
    engine = engine_of(request)
    check_body(body)
    if engine.config.server.api_server_count > 1:
        body = _without_store(body)
    model = check_model(request, body.model)
    store = store_of(request)
    earlier = _earlier(body.previous_response_id, store)
    given = _resolved(body.input, store)
    messages = [*earlier, *await off_loop(body_size(request), lambda: to_messages(given, earlier))]
    prompt = with_instructions(messages, body.instructions)
    with renamed(FIELD_NAMES):
        chat = chat_body(chat_fields(body, prompt) | _streaming(body))
        if body.truncation == "auto":
            chat = await _shortened(chat, engine)
        answer = Answer(body, engine, store, messages, Writer(response_object(body, model, engine)))
        if body.background:
            return await _background(answer, chat, request)
        if chat.stream:
            stream = await open_chat(chat, request, "resp-")
            events = events_of(answer, stream)
            if body.stream:
                return await sse_response(request, events, stream.close)
            try:
                await unless_hangup(request, _drained(events))
            finally:
                stream.close()
        else:
            whole = await run_chat(chat, request, "resp-")
            choice = whole.choices[0]
            for piece in pieces_of(choice.message):
                answer.add(piece)
            await answer.end(choice.finish_reason, whole.usage)
            answer.keep()
    return _json(answer.writer.response)


@router.get("/v1/responses/{response_id}", response_model=None, responses=streamed(400, 404))
async def retrieve(
    response_id: str, request: Request, stream: bool = False, starting_after: int | None = None
) -> Response:
    """A stored response. `stream` gives the events of one that was created with background and
    stream, from the beginning or after that sequence_number."""
    stored = _find(request, response_id)
    if not stream:
        return _json(stored.response)
    if stored.job is None or not stored.streamed:
        text = "stream needs a response that was created with background: true and stream: true"
        raise ApiError(400, text, param="stream")
    after = -1 if starting_after is None else starting_after
    return await sse_response(request, followed(stored.job, after), _readers_gone)


@router.post(
    "/v1/responses/{response_id}/cancel", response_model=None, responses=answers(400, 404, 413)
)
async def cancel(response_id: str, request: Request) -> Response:
    """Stop a response that is made in the background; one that is done stays as it is."""
    stored = _find(request, response_id)
    if stored.job is None:
        text = f"response {response_id!r} was not created with background: true"
        raise ApiError(400, text, param="response_id")
    await _stop(stored.job)
    return _json(stored.response)


@router.delete("/v1/responses/{response_id}", response_model=None, responses=answers(404, 413))
async def delete(response_id: str, request: Request) -> Response:
    """Forget a response; one that is still made is stopped."""
    stored = _find(request, response_id)
    store_of(request).drop(response_id)
    if stored.job is not None:
        await _stop(stored.job)
    return _json({"id": response_id, "object": "response", "deleted": True})


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


# -- before the answer ---------------------------------------------------------------------------


def _find(request: Request, response_id: str) -> Stored:
    stored = store_of(request).get(response_id)
    if stored is None:
        text = f"no response with id {response_id!r} is stored"
        raise ApiError(404, text, param="response_id", code="response_not_found")
    return stored


def _earlier(response_id: str | None, store: ResponseStore) -> Sequence[Message]:
    """The conversation that ends with the response of that id."""
    if response_id is None:
        return ()
    name, stored = "previous_response_id", store.get(response_id)
    if stored is None:
        text = f"{name}: no response with id {response_id!r} is stored"
        raise ApiError(400, text, param=name, code="previous_response_not_found")
    status = stored.response["status"]
    if status not in ("completed", "incomplete"):
        raise ApiError(400, f"{name}: response {response_id!r} is {status}", param=name)
    return stored.messages


def _resolved(items: str | Sequence[Any], store: ResponseStore) -> str | Sequence[Any]:
    """The input with stored items in the place of references to them: {"type": "item_reference",
    "id": ...}, or an object that has nothing but an id. Raises ApiError 404 naming the item."""
    if isinstance(items, str):
        return items
    made = []
    for i, item in enumerate(items):
        if not is_reference(item):
            made.append(item)
            continue
        stored = store.item(item["id"]) if isinstance(item["id"], str) else None
        if stored is None:
            text = (
                f"input[{i}]: no item with id {item['id']!r:.60} is stored; items are stored with "
                "their response, unless it was made with store: false"
            )
            raise ApiError(404, text, param="input", code="item_not_found")
        made.append(stored)
    return made


def _without_store(body: ResponsesBody) -> ResponsesBody:
    """For a server of several processes: the one that is asked later has no stored responses."""
    for name in ("background", "previous_response_id"):
        if getattr(body, name):
            text = f"{name} needs a server with --api-server-count 1"
            raise ApiError(400, text, param=name, code="unsupported")
    return body.model_copy(update={"store": False})


def _streaming(body: ResponsesBody) -> dict[str, Any]:
    """Streams the chat for a response that is streamed itself, can be cancelled, or must tell the
    log-probabilities of its text from those of reasoning."""
    if not (body.stream or body.background or body.wants_logprobs):
        return {}
    return {"stream": True, "stream_options": {"include_usage": True}}


async def _shortened(chat: ChatBody, engine: AsyncLLM) -> ChatBody:
    """The request less as few of its first messages as make it fit, with room for the answer."""
    length = engine.ready.max_model_len
    most, wanted = length - 1, chat.max_completion_tokens
    if wanted is not None and wanted >= 1:
        most = length - min(int(wanted), max(1, length // 2))
    cuts = droppable(chat.messages)
    low, high = 0, len(cuts) - 1
    while low < high:  # the least cut that fits, or the last one
        middle = (low + high) // 2
        shorter = chat.model_copy(update={"messages": without(chat.messages, cuts[middle])})
        if await count_prompt(shorter, engine) <= most:
            high = middle
        else:
            low = middle + 1
    return chat.model_copy(update={"messages": without(chat.messages, cuts[low])}) if cuts else chat


# -- the answer ----------------------------------------------------------------------------------


async def _drained(events: AsyncGenerator[bytes]) -> None:
    async for _ in events:
        continue


async def _background(answer: Answer, chat: ChatBody, request: Request) -> Response:
    """Let the request run without its client, once the engine has taken it."""
    if answer.store.is_full:
        text = "too many responses are being made in the background already"
        raise ApiError(503, text, code="overloaded")
    stream = await open_chat(chat, request, "resp-")
    job = Job()
    stored = answer.stored()
    stored.job, stored.streamed = job, bool(answer.body.stream)
    answer.store.put(stored)
    queued = _json(answer.writer.response)
    job.task = asyncio.create_task(run_job(answer, stream, stored, job), name="jaxengine-response")
    await asyncio.sleep(0)  # into its try, so that a cancelled task still cleans up
    if stored.streamed:
        return await sse_response(request, followed(job, -1), _readers_gone)
    return queued


async def _stop(job: Job) -> None:
    if job.task is not None and not job.task.done():
        job.task.cancel()
        await asyncio.wait({job.task})


def _json(body: dict[str, Any]) -> Response:
    return Response(encode(body), media_type="application/json")


def _readers_gone() -> None:
    """A background response runs on without them."""
