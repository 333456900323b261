"""Metrics of the HTTP requests themselves: how many, how long, how large. Families and labels are
those of the usual Prometheus instrumentation of FastAPI, which dashboards know."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.1, 0.5, 1.0)
_FINE = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10,
    30, 60,
)  # fmt: skip
# asked for all the time by those who watch
_LEFT_OUT = frozenset(("/metrics", "/health", "/health/live", "/load", "/ping", "/version"))


class HttpMetrics:
    """One process's figures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        by = ["handler", "method"]
        self._requests = Counter(
            "jaxengine:http_requests",
            "Requests by handler, method and class of the status.",
            [*by, "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "jaxengine:http_request_duration_seconds",
            "Seconds to the end of the answer, by handler and method.",
            by,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._fine = Histogram(
            "jaxengine:http_request_duration_highr_seconds",
            "Seconds to the end of the answer, in many buckets.",
            buckets=_FINE,
            registry=self.registry,
        )
        self._received = Summary(
            "jaxengine:http_request_size_bytes",
            "Content-Length of requests, by handler.",
            ["handler"],
            registry=self.registry,
        )
        self._sent = Summary(
            "jaxengine:http_response_size_bytes",
            "Bytes of answers, by handler.",
            ["handler"],
            registry=self.registry,
        )

    def observe(
        self, handler: str, method: str, status: int, seconds: float, received: int, sent: int
    ) -> None:
        """An answer has ended. Status 0: there was none, the client had gone."""
        kind = f"{status // 100}xx" if status else "none"
        self._requests.labels(handler=handler, method=method, status=kind).inc()
        self._seconds.labels(handler=handler, method=method).observe(seconds)
        self._fine.observe(seconds)
        self._received.labels(handler=handler).observe(received)
        self._sent.labels(handler=handler).observe(sent)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Observer:
    """ASGI middleware that fills the `HttpMetrics` of the app's server state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, sent = time.monotonic(), 0, 0

        async def counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            route = scope.get("route")
            # not the path as asked: clients could make any number of series with it
            handler = getattr(route, "path", "none")
            if handler not in _LEFT_OUT:
                seconds = time.monotonic() - began
                metrics: HttpMetrics = scope["app"].state.server.http
                method = _method(scope["method"])
                metrics.observe(handler, method, status, seconds, _length(scope), sent)


def _method(method: str) -> str:
    known = ("GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PATCH")
    return method if method in known else "other"


def _length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
