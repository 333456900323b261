"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxengine.server.errors import error_body, to_api_error
from jaxengine.server.state import state_of
from jaxengine.server.streams import unless_hangup

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients pass over


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class SseResponse(StreamingResponse):
    """Server-sent events; `close` runs however the response ends, started or not."""

    def __init__(self, content: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def sse_response(
    request: Request, chunks: AsyncGenerator[bytes], close: Callable[[], None]
) -> SseResponse:
    """Wait for the first events, so that an early error still gets its own status; then stream.

    `chunks` are one or more whole events each, the last with `DONE`: one write to the socket each.
    A later error is sent as one last event {"error": ...}, without [DONE]. With
    --sse-keep-alive-interval the stream begins after that time at the latest, with a comment.
    """
    interval = state_of(request).config.server.sse_keep_alive_interval
    if interval > 0:
        return await _kept_alive(request, chunks, close, interval)
    try:
        first = await unless_hangup(request, _next(chunks))
    except BaseException:
        close()
        raise

    async def body() -> AsyncIterator[bytes]:
        try:
            if first:
                yield first
            async for chunk in chunks:
                yield chunk
        except Exception as error:  # noqa: BLE001 - the 200 is sent; the stream must say so itself
            yield event(error_body(to_api_error(error)))

    return SseResponse(body(), close)


async def _kept_alive(
    request: Request, chunks: AsyncGenerator[bytes], close: Callable[[], None], interval: float
) -> SseResponse:
    """With a comment whenever there was nothing to send for `interval` seconds."""
    task = asyncio.ensure_future(_next(chunks))
    try:
        await unless_hangup(request, _wait(task, interval))
        if task.done():
            task.result()
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        close()
        raise

    async def body() -> AsyncIterator[bytes]:
        nonlocal task
        try:
            while True:
                while not task.done():
                    yield KEEP_ALIVE
                    await _wait(task, interval)
                chunk = task.result()
                if not chunk:
                    return
                yield chunk
                task = asyncio.ensure_future(_next(chunks))
                await _wait(task, interval)
        except Exception as error:  # noqa: BLE001 - as in sse_response
            yield event(error_body(to_api_error(error)))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return SseResponse(body(), close)


async def _wait(task: asyncio.Future[bytes], seconds: float) -> None:
    await asyncio.wait({task}, timeout=seconds)


async def _next(chunks: AsyncGenerator[bytes]) -> bytes:
    return await anext(chunks, b"")  # a reader may be at the end already
