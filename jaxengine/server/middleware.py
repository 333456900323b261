"""Around every request: its id, the API key, the size of its body, the access log."""

from __future__ import annotations

import hmac
import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxengine.config import ServerConfig
from jaxengine.metrics.tracing import HEADER_NAMES, TRACE_HEADERS
from jaxengine.server.admin import is_admin
from jaxengine.server.anthropic_errors import anthropic_error, is_anthropic
from jaxengine.server.errors import CLIENT_GONE, ApiError, error_response
from jaxengine.server.state import REQUEST_ID

log = logging.getLogger("jaxengine.access")

_OPEN_PATHS = frozenset({"/health", "/health/live"})
_PAGE = "/"  # the chat page holds no secret, and is where a key is typed in


def _encoded(*keys: str | None) -> list[bytes]:
    return [key.encode() for key in keys if key]


def _given_key(headers: Headers) -> bytes:
    """The bearer token, or X-Api-Key, which Anthropic's clients send."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.encode("latin-1")
    return headers.get("x-api-key", "").encode("latin-1")


def path_of(scope: Scope) -> str:
    """The path below the root path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) or "/" if root else path


def needs_key(config: ServerConfig, path: str) -> bool:
    """Whether a route of this server asks for a key."""
    if path in _OPEN_PATHS or path == _PAGE:
        return False
    return bool(config.api_key) or (is_admin(path) and bool(config.admin_api_key))


class Gate:
    """ASGI middleware (not Starlette's BaseHTTPMiddleware: that hides hang-ups from routes)."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = _encoded(config.api_key, config.admin_api_key)
        self._admin_keys = _encoded(config.admin_api_key or config.api_key)
        self._config = config
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
        known = bool(REQUEST_ID.fullmatch(given))
        scope["request_id"] = given if known else uuid.uuid4().hex
        scope["request_id_given"] = known  # else a body may name it
        TRACE_HEADERS.set({n: headers[n] for n in HEADER_NAMES if n in headers} or None)
        path = path_of(scope)
        status = CLIENT_GONE
        began = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = scope["request_id"]
            await send(message)

        try:
            refusal = self._refusal(path, headers, scope["method"])
            if refusal is not None:
                anthropic = is_anthropic(path)
                answer = (
                    anthropic_error(refusal, scope["request_id"])
                    if anthropic
                    else error_response(refusal)
                )
                await answer(scope, receive, send_with_id)
            else:
                await self._app(scope, self._limited(receive), send_with_id)
        finally:
            level = logging.DEBUG if path in _OPEN_PATHS else logging.INFO
            spent = 1000 * (time.monotonic() - began)
            log.log(
                level,
                "%s %s %s %d %.0f ms",
                scope["request_id"],
                scope["method"],
                path,
                status,
                spent,
            )

    def _refusal(self, path: str, headers: Headers, method: str) -> ApiError | None:
        if method != "OPTIONS" and needs_key(self._config, path):
            admin = is_admin(path)
            given = _given_key(headers)
            # all are compared, so that the time tells nothing
            keys = self._admin_keys if admin else self._keys
            if not any([hmac.compare_digest(given, key) for key in keys]):
                which = "admin" if admin else "API"
                return ApiError(401, f"a valid {which} key is needed (Authorization: Bearer KEY)")
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
