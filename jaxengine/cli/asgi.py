"""Calls of an ASGI app in its own process, without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def post(app: ASGIApp, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    """The app's answer to a POST of JSON. Raises what the app raises before it answered; after its
    500, which tells of the error, the error is raised once more for a server's log alone."""
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in given.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    answer, parts = Answer(), [body]

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()  # this client never hangs up
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode("latin-1") for k, v in message["headers"]}
        elif message["type"] == "http.response.body":
            answer.body += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception:  # of a 500 that was sent: the application has logged it
        if answer.status != 500:
            raise
    return answer
