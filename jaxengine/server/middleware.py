"""Around every request: its id, the API key, where it comes from, the size of its body, the access
log."""

from __future__ import annotations

import asyncio
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
from jaxengine.server.anthropic.errors import anthropic_error, is_anthropic
from jaxengine.server.errors import CLIENT_GONE, ApiError, error_response
from jaxengine.server.hosts import is_trusted, netloc_of, trusted_hosts
from jaxengine.server.keys import Keys
from jaxengine.server.memory import LARGE, give_back
from jaxengine.server.state import REQUEST_ID

log = logging.getLogger("jaxengine.access")

_OPEN_PATHS = frozenset({"/health", "/health/live"})
_PAGE = "/"  # the chat page holds no secret, and is where a key is typed in
# Separators of JSON in one body. A text of 32 MB has about half as many; lists and objects in such
# numbers would hold up every other request while they are read.
MAX_VALUES = 1_000_000
_LONGEST_LOGGED = 256  # characters of a path


def _given_key(headers: Headers) -> bytes:
    """The bearer token, or X-Api-Key, which Anthropic's clients send."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.encode("latin-1")
    return headers.get("x-api-key", "").encode("latin-1")


def needs_key(keys: Keys, path: str) -> bool:
    """Whether a route of a server with these keys asks for one."""
    if path in _OPEN_PATHS or path == _PAGE:
        return False
    return keys.api is not None or (is_admin(path) and keys.admin is not None)


class Gate:
    """ASGI middleware (not Starlette's BaseHTTPMiddleware: that hides hang-ups from routes)."""

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: Keys) -> None:
        self._app = app
        self._keys = keys
        self._any = [key for key in (keys.api, keys.admin) if key is not None]
        self._admin = [key for key in (keys.admin or keys.api,) if key is not None]
        self._root = config.root_path.rstrip("/")
        self._max_bytes = config.max_request_bytes
        self._origins = config.allowed_origins
        self._hosts = None if keys.api is not None else trusted_hosts(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        known = bool(REQUEST_ID.fullmatch(given))
        scope["request_id"] = given if known else uuid.uuid4().hex
        scope["request_id_given"] = known  # else a body may name it
        TRACE_HEADERS.set({n: headers[n] for n in HEADER_NAMES if n in headers} or None)
        path = self._below_root(scope)
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
                if headers.get("expect", "").lower() != "100-continue":
                    await self._discard(receive)
                await answer(scope, receive, send_with_id)
            else:
                # every body here is JSON, whatever its label: `curl -d` calls it a form
                unlabelled = [h for h in scope["headers"] if h[0] != b"content-type"]
                scope["headers"] = [*unlabelled, (b"content-type", b"application/json")]
                await self._app(scope, self._counted(scope, receive), send_with_id)
        finally:
            if scope.get("body_bytes", 0) > LARGE:
                asyncio.get_running_loop().run_in_executor(None, give_back)
            level = logging.DEBUG if path in _OPEN_PATHS else logging.INFO
            spent = 1000 * (time.monotonic() - began)
            log.log(
                level,
                "%s %s %s %d %.0f ms",
                scope["request_id"],
                scope["method"],
                printable(path),
                status,
                spent,
            )

    def _below_root(self, scope: Scope) -> str:
        """The path below the root path, with which a proxy may have called, or not. The scope says
        it as ASGI wants it: the root path is part of the path."""
        path: str = scope["path"]
        root = self._root
        if root and (path == root or path.startswith(f"{root}/")):
            path = path[len(root) :] or "/"
        scope["root_path"] = root
        scope["path"] = root + path
        return path

    def _refusal(self, path: str, headers: Headers, method: str) -> ApiError | None:
        if self._hosts is not None and not is_trusted(headers.get("host", ""), self._hosts):
            host = printable(headers.get("host", ""))
            return ApiError(
                403,
                f"a server without a key on this machine alone does not answer to the name {host}: "
                "start it with --api-key, or with --allowed-hosts NAME",
                code="host_not_allowed",
            )
        if method != "OPTIONS" and needs_key(self._keys, path):
            admin = is_admin(path)
            given = _given_key(headers)
            # all are compared, so that the time tells nothing
            keys = self._admin if admin else self._any
            if not any([hmac.compare_digest(given, key) for key in keys]):
                which = "admin" if admin else "API"
                return ApiError(401, f"a valid {which} key is needed (Authorization: Bearer KEY)")
        if method not in ("GET", "HEAD", "OPTIONS") and self._is_foreign(path, headers):
            return ApiError(
                403,
                "a page of another origin may not send this: start the server with "
                "--allowed-origins",
                code="origin_not_allowed",
            )
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 19:
            return ApiError(400, "Content-Length is not a number of bytes")
        if int(length) > self._max_bytes:
            return self._too_large()
        return None

    def _is_foreign(self, path: str, headers: Headers) -> bool:
        """Whether a browser sends this for a page of elsewhere, without having asked first: it asks
        (CORS) before it sends JSON as such. Admin routes take nothing from such a page at all."""
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return False
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json" and not is_admin(path):
            return False
        return netloc_of(origin) != headers.get("host", "").lower()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes")

    async def _discard(self, receive: Receive) -> None:
        """Read what comes of a body that nobody wants, within the limit: most clients read the
        answer only once they have sent it all."""
        size, more = 0, True
        while more and size <= self._max_bytes:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)

    def _counted(self, scope: Scope, receive: Receive) -> Receive:
        """Count what a body holds as it comes: bytes, which need not have been announced, and
        values."""
        size = values = 0

        async def counted() -> Message:
            nonlocal size, values
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                part = message.get("body", b"")
                size += len(part)
                values += part.count(b",") + part.count(b"{") + part.count(b"[")
                scope["body_bytes"] = size
                if size > self._max_bytes:
                    raise HTTPException(413, self._too_large().message)
                if values <= MAX_VALUES:
                    return message
                if not message.get("more_body", False):  # a client reads once it has sent it all
                    raise HTTPException(413, f"the body holds more than {MAX_VALUES} values")

        return counted


def printable(text: str) -> str:
    """A text of a client's for one line of the log: control characters and what is beyond ASCII
    are escaped, and no more than its beginning is shown."""
    shown = text[:_LONGEST_LOGGED].encode("unicode_escape").decode()
    return shown if len(text) <= _LONGEST_LOGGED else f"{shown}..."
