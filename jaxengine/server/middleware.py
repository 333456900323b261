"""Around every request: its id, the API key, the size of its body, the access log."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxengine.config import ServerConfig
from jaxengine.server.errors import CLIENT_GONE, ApiError, error_response

log = logging.getLogger("jaxengine.access")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN_PATHS = frozenset({"/health", "/health/live"})


class Gate:
    """ASGI middleware (not Starlette's BaseHTTPMiddleware: that hides hang-ups from routes)."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._key = None if config.api_key is None else f"Bearer {config.api_key}".encode()
        self._max_bytes = config.max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        # every body here is JSON, whatever its label: `curl -d` calls it a form
        unlabelled = [h for h in scope["headers"] if h[0] != b"content-type"]
        scope["headers"] = [*unlabelled, (b"content-type", b"application/json")]
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        status = CLIENT_GONE
        began = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers, scope["method"])
            if refusal is not None:
                await error_response(refusal)(scope, receive, send_with_id)
            else:
                await self._app(scope, self._limited(receive), send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in _OPEN_PATHS else logging.INFO
            spent = 1000 * (time.monotonic() - began)
            log.log(
                level,
                "%s %s %s %d %.0f ms",
                request_id,
                scope["method"],
                scope["path"],
                status,
                spent,
            )

    def _refusal(self, path: str, headers: Headers, method: str) -> ApiError | None:
        if self._key is not None and path not in _OPEN_PATHS and method != "OPTIONS":
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._key):
                return ApiError(401, "a valid API key is needed (Authorization: Bearer KEY)")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes")

    def _limited(self, receive: Receive) -> Receive:
        """Count a body that came without Content-Length."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._max_bytes:
                    raise HTTPException(413, self._too_large().message)
            return message

        return counted
