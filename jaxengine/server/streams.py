"""The engine's streams of one HTTP request: admitted, awaited, merged, and closed when the client
goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request

from jaxengine.engine.async_llm import AsyncLLM, Kind, RequestStream
from jaxengine.engine.process import INVALID_REQUEST
from jaxengine.frontend.outputs import RequestOutput
from jaxengine.frontend.processor import Prompt
from jaxengine.sampling_params import SamplingParams
from jaxengine.server.errors import ApiError, ClientGone


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


def raise_if_failed(output: RequestOutput) -> None:
    """ApiError when the engine ended a sequence with an error: 400 if it refused it, else 500."""
    for choice in output.outputs:
        if choice.finish_reason == "error":
            refused = choice.stop_reason == INVALID_REQUEST
            text = choice.error or "the engine could not finish this request"
            raise ApiError(400 if refused else 500, text, param="prompt" if refused else None)


async def final_outputs(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The last output of each stream of kind "final"."""
    finals = []
    for stream in streams:
        last = None
        async for output in stream:
            raise_if_failed(output)
            last = output
        if last is None:
            raise ApiError(500, "the engine ended a request without an output")
        finals.append(last)
    return finals


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of all streams as they come, with the stream's position."""
    if len(streams) == 1:
        async for output in streams[0]:
            raise_if_failed(output)
            yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(s, None)): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                ready = task.result()
                if ready is None:
                    continue
                raise_if_failed(ready)
                waiting[asyncio.ensure_future(anext(streams[index], None))] = index
                yield index, ready
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


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
    *,
    kind: Kind,
    priority: int = 0,
    cache_salt: str | None = None,
) -> list[RequestStream]:
    """A stream for each prompt; all or none: what was admitted is closed when one is refused."""
    streams: list[RequestStream] = []
    try:
        for i, prompt in enumerate(prompts):
            name = request_id if len(prompts) == 1 else f"{request_id}-{i}"
            stream = await engine.add(
                prompt, params, name, kind=kind, priority=priority, cache_salt=cache_salt
            )
            streams.append(stream)
    except BaseException:
        close_all(streams)()
        raise
    return streams
