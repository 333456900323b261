"""--metrics-port: /metrics and /health on a port of their own, where no key is asked for. It is for
whoever cannot send one (a scraper told by annotations, a probe), and serves nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI

from jaxengine.server import errors
from jaxengine.server.http_protocol import BoundedProtocol
from jaxengine.server.state import ServerState


class _Server(uvicorn.Server):
    """Signals are the main server's."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def metrics_app(state: ServerState) -> FastAPI:
    """The app of that port."""
    from jaxengine.server.basic import health, live, metrics

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = state
    errors.install(app)
    for path, route in (("/metrics", metrics), ("/health", health), ("/health/live", live)):
        app.add_api_route(path, route, methods=["GET"], response_model=None)
    return app


@contextlib.asynccontextmanager
async def metrics_served(listener: socket.socket | None, state: ServerState) -> AsyncIterator[None]:
    """Serve them while the block runs; nothing without a listener."""
    if listener is None:
        yield
        return
    settings = uvicorn.Config(
        metrics_app(state),
        log_config=None,
        access_log=False,
        lifespan="off",
        http=BoundedProtocol,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = _Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
