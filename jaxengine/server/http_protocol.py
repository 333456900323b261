"""Uvicorn's HTTP protocol with bounds: on the bytes of a request's head, and on the time that the
head and the body may take. Without them a client that has no key fills the memory with headers, or
takes every connection with half requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 64 * 1024  # of the request line and all headers
HEAD_SECONDS = 10.0  # from a connection, or the first byte of a request, to the end of its head
BODY_SECONDS = 30.0  # in which a body must come to its end, or on by so many bytes
BODY_BYTES = 32 * 1024


class _HeadTooLargeError(Exception):
    """Ends the parsing of a request whose head is too large."""


class BoundedProtocol(HttpToolsProtocol):
    """A request with a larger head is answered 431, one that does not come to its end 408; the
    connection is closed behind either answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True  # what comes next belongs to a head
        self._head_size = 0  # bytes of it so far, trailers included
        self._in_body = False
        self._body_size = 0  # bytes of the body since the timer was set
        self._timer: asyncio.TimerHandle | None = None
        self._too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            if self._timer is None:
                self._set_timer(HEAD_SECONDS)
            self._head_size += len(data)
        super().data_received(data)
        # a header that never ends shows in no callback
        if self._in_head and self._head_size > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, "the head of the request is too large")

    # -- the parser's callbacks ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._listed = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._listed += len(name) + len(value) + 4
        if self._listed > HEAD_BYTES:
            self._too_large = True
            raise _HeadTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._listed + len(self.url) > HEAD_BYTES:
            self._too_large = True
            raise _HeadTooLargeError
        self._in_head, self._in_body = False, True
        self._head_size = self._body_size = 0
        super().on_headers_complete()
        self._set_timer(BODY_SECONDS)

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._in_body = True, False
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser has given up, on a head that was too large or on what is no HTTP."""
        if self._too_large:
            self._refuse(431, "the head of the request is too large")
        else:
            super().send_400_response(msg)

    # -- time ------------------------------------------------------------------------------------

    def _set_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        # reading stands still when the body is not taken yet: that is not the client's doing
        if self._in_body and (self._body_size >= BODY_BYTES or self.flow.read_paused):
            self._body_size = 0
            self._set_timer(BODY_SECONDS)
            return
        self._refuse(408, "the request did not come to its end in time")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless an answer is under way, and close."""
        self._stop_timer()
        answering = self.cycle is not None and not self.cycle.response_complete
        begun = answering and self.cycle.response_started
        if not begun and (self._in_body or self._head_size > 0):
            body = f'{{"error":{{"message":"{message}","type":"invalid_request_error",'
            body += f'"param":null,"code":{status}}}}}'
            head = b"content-type: application/json\r\nconnection: close\r\n"
            length = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + length + body.encode())
        self.transport.close()
