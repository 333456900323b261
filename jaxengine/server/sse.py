"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxengine.server.errors import error_body, to_api_error
from jaxengine.server.streams import unless_hangup

DONE = b"data: [DONE]\n\n"


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
    A later error is sent as one last event {"error": ...}, without [DONE].
    """
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


async def _next(chunks: AsyncGenerator[bytes]) -> bytes:
    return await anext(chunks, b"")  # a reader may be at the end already
