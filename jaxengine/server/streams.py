"""The engine's streams of one HTTP request: admitted, awaited, merged, and closed when the client
goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request

from jaxengine.front.async_llm import AsyncLLM, Placement, RequestStream
from jaxengine.sampling_params import SamplingParams
from jaxengine.server.answer.constraints import named_as_given
from jaxengine.server.errors import ApiError, ClientGone
from jaxengine.server.openai.protocol import SamplingBody
from jaxengine.text.outputs import RequestOutput
from jaxengine.text.processor import Prompt
from jaxengine.validation import RequestError
from jaxengine.wire.messages import INVALID_REQUEST, OVERLOADED, UNAVAILABLE

_TURN = 16  # prompts admitted before other tasks get the event loop


async def unless_hangup[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientGone (with `work` cancelled) when the client goes first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_hangup(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _hangup(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def raise_if_failed(output: RequestOutput, field: str = "") -> None:
    """ApiError when the engine ended a sequence with an error: 400 if it refused it, 503 if it had
    failed itself before, else 500. `field`: by what name the client gave a constraint."""
    for choice in output.outputs:
        if choice.finish_reason == "error":
            text = choice.error or "the engine could not finish this request"
            if choice.stop_reason in (UNAVAILABLE, OVERLOADED):
                raise ApiError(503, text, code=str(choice.stop_reason))
            # what only the engine finds out of a constraint is the client's mistake too
            constraint = text.startswith("structured_outputs")
            refused = constraint or choice.stop_reason == INVALID_REQUEST
            param = "structured_outputs" if constraint else "prompt"
            if constraint:
                named = named_as_given(RequestError(param, text), field)
                param, text = named.field, named.message
            raise ApiError(400 if refused else 500, text, param=param if refused else None)


async def final_outputs(streams: Sequence[RequestStream], field: str = "") -> list[RequestOutput]:
    """The last output of each stream of kind "final"; `field` as in `raise_if_failed`."""
    finals = []
    for stream in streams:
        last = None
        async for output in stream:
            raise_if_failed(output, field)
            last = output
        if last is None:
            raise ApiError(500, "the engine ended a request without an output")
        finals.append(last)
    return finals


async def merged(
    streams: Sequence[RequestStream], field: str = ""
) -> AsyncIterator[tuple[list[tuple[int, RequestOutput]], bool]]:
    """Whenever there is something: all that came meanwhile, as (position of the stream, output),
    and whether that was the last. `field` as in `raise_if_failed`."""
    wake = asyncio.Event()
    for stream in streams:
        stream.wake(wake)
    left = dict(enumerate(streams))
    while left:
        wake.clear()
        news = [(i, out) for i, s in left.items() if (out := s.poll()) is not None]
        if not news:
            await wake.wait()
            continue
        for i, output in news:
            raise_if_failed(output, field)
            if output.finished:
                del left[i]
        yield news, not left


def close_all(streams: Sequence[RequestStream]) -> Callable[[], None]:
    def close() -> None:
        for stream in streams:
            stream.close()

    return close


async def admit(
    engine: AsyncLLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    request_id: str,
    body: SamplingBody,
    placement: Placement,
    field: str = "",
) -> list[RequestStream]:
    """A stream for each prompt; all or none: what was admitted is closed when one is refused.
    `field` as in `raise_if_failed`."""
    streams: list[RequestStream] = []
    try:
        for i, prompt in enumerate(prompts):
            if i % _TURN == _TURN - 1:
                await asyncio.sleep(0)  # others go on
            name = request_id if len(prompts) == 1 else f"{request_id}-{i}"
            stream = await engine.add(
                prompt,
                params,
                name,
                kind="delta" if body.stream else "final",
                # a number that is no integer is refused with the other parameters
                priority=0 if body.priority is None else body.priority,  # type: ignore[arg-type]
                cache_salt=body.cache_salt,
                placement=placement,
            )
            streams.append(stream)
    except BaseException as error:
        close_all(streams)()
        if isinstance(error, RequestError) and params.structured_outputs is not None:
            raise named_as_given(error, field) from None
        raise
    return streams
