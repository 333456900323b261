"""`serve`: the listening socket, the engine's start beside it, signals, the drain, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from types import FrameType

import uvicorn

from jaxengine.config import EngineConfig
from jaxengine.engine import wire
from jaxengine.engine.async_llm import AsyncLLM, EngineStartError
from jaxengine.metrics.status import log_status
from jaxengine.server.app import build_app
from jaxengine.server.state import ServerState

log = logging.getLogger(__name__)

DEATH_GRACE = 3.0  # seconds of 503 answers after the engine died, before the server gives up
_CLOSE_GRACE = 2  # seconds for connections to close once their requests are done
EXIT_ERROR, EXIT_USAGE = 1, 2


class _Server(uvicorn.Server):
    """Uvicorn with our own signal handling: the listener stays open (503) during the drain."""

    stopping: asyncio.Event
    loop: asyncio.AbstractEventLoop
    engine: AsyncLLM | None = None
    signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals == 1:
            self.loop.call_soon_threadsafe(self.stopping.set)
            return
        if self.engine is not None:  # a second signal ends everything at once
            self.engine.kill()
        os._exit(128 + sig)


def serve(config: EngineConfig, core: str = wire.DEFAULT_CORE) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code: 0 after a clean stop, 1 when the
    engine failed, 2 when the configuration is at fault."""
    try:
        listener = _listen(config.server.host, config.server.port)
    except OSError as error:
        where = f"{config.server.host}:{config.server.port}"
        print(f"jaxengine: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        return EXIT_ERROR
    with listener:
        return uvicorn_loop().run(_serve(config, core, listener))


def uvicorn_loop() -> asyncio.Runner:
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


async def _serve(config: EngineConfig, core: str, listener: socket.socket) -> int:
    app = build_app(None, config)
    state: ServerState = app.state.server
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSE_GRACE,
            http="httptools",
        )
    )
    server.stopping = asyncio.Event()
    server.loop = asyncio.get_running_loop()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        return await _run(config, core, listener, state, server)
    finally:
        server.should_exit = True
        await serving


async def _run(
    config: EngineConfig, core: str, listener: socket.socket, state: ServerState, server: _Server
) -> int:
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d; loading %s", host, port, config.model.model)
    stop = asyncio.create_task(server.stopping.wait())
    engine = AsyncLLM(config, core=core)
    server.engine = engine
    starting = asyncio.create_task(engine.launch())
    await asyncio.wait({stop, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # told to stop while loading
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    try:
        starting.result()
    except EngineStartError as error:
        if not error.user_error and error.trace:
            print(error.trace, file=sys.stderr)
        print(f"jaxengine: {error}", file=sys.stderr)
        return EXIT_USAGE if error.user_error else EXIT_ERROR
    except (ValueError, OSError) as error:
        print(f"jaxengine: {error}", file=sys.stderr)
        return EXIT_USAGE
    state.engine = engine
    ready = engine.ready
    log.info(
        "ready: %d engines, context %d tokens, %d KV blocks of %d tokens",
        len(engine.board.ranks),
        ready.max_model_len,
        ready.num_blocks,
        ready.block_size,
    )
    print(f"jaxengine serves {state.model_names[0]} at http://{host}:{port}", flush=True)
    status = None
    if not config.server.disable_log_stats:
        status = asyncio.create_task(log_status(engine.metrics))
    dead = asyncio.create_task(engine.wait_dead())
    await asyncio.wait({stop, dead}, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if dead.done():
        code = EXIT_ERROR
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(stop), DEATH_GRACE)
    for task in (stop, dead, status):
        if task is not None:
            task.cancel()
    state.draining = True
    if engine.num_requests:
        log.info("draining %d requests", engine.num_requests)
    await engine.shutdown(config.server.shutdown_timeout)
    return code
