"""`serve`: the listening socket, the engine's start beside it, signals, the drain, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from jaxengine.config import EngineConfig
from jaxengine.front.async_llm import AsyncLLM, EngineStartError
from jaxengine.metrics.prometheus import Metrics
from jaxengine.metrics.status import log_status
from jaxengine.metrics.tracing import Tracer
from jaxengine.server import sockets
from jaxengine.server.hosts import is_loopback
from jaxengine.server.http_protocol import BoundedProtocol
from jaxengine.server.keys import keys_of
from jaxengine.vllm_names import note_vllm_environment
from jaxengine.wire import frames as wire
from jaxengine.wire.messages import EngineReady

if TYPE_CHECKING:
    from fastapi import FastAPI

    from jaxengine.server.state import ServerState

log = logging.getLogger(__name__)

DEATH_GRACE = 3.0  # seconds of 503 answers after the engine died, before the server gives up
CLOSE_GRACE = 2  # seconds for connections to close once their requests are done
EXIT_ERROR, EXIT_USAGE = 1, 2
_MOST_FILES = 1 << 20
_OPEN = (
    "this server has no key and listens on %s: whoever reaches it can use it, and pause, put to "
    "sleep or profile it; give --api-key-file, or the environment variable JAXENGINE_API_KEY"
)


class _Server(uvicorn.Server):
    """Uvicorn with our own signal handling: the listener stays open (503) during the drain."""

    stopping: asyncio.Event
    loop: asyncio.AbstractEventLoop
    engine: AsyncLLM | None = None
    supervised = False
    signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.supervised and sig == signal.SIGINT:
            return  # Ctrl-C goes to the whole group; the supervisor decides
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
    keys = keys_of(config.server)
    if keys.api is None and not (config.server.uds or is_loopback(config.server.host)):
        log.warning(_OPEN, config.server.host)
    note_vllm_environment()
    raise_file_limit()
    count = config.server.api_server_count
    where = sockets.address_of(config.server)
    try:
        listeners = sockets.listen(config.server, count)
        where = f"port {config.server.metrics_port} (--metrics-port)"
        metrics = sockets.listen_for_metrics(config.server)
    except OSError as error:
        print(f"jaxengine: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        return EXIT_ERROR
    try:
        if count > 1:
            from jaxengine.server.processes import supervise

            return uvicorn_loop().run(supervise(config, core, listeners, metrics))
        return uvicorn_loop().run(_serve_alone(config, core, listeners[0], metrics))
    finally:
        sockets.close(listeners, config.server)
        if metrics is not None:
            metrics.close()


def raise_file_limit() -> None:
    """As many open files as this process may have: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def uvicorn_loop() -> asyncio.Runner:
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _serve_alone(
    config: EngineConfig,
    core: str,
    listeners: sockets.Listeners,
    metrics: socket.socket | None,
) -> int:
    url = sockets.url_of(listeners[0], config.server)
    engine = AsyncLLM(config, core=core)
    return await answer(config, listeners, engine, url, metrics=metrics)


async def answer(
    config: EngineConfig,
    listeners: sockets.Listeners,
    engine: AsyncLLM,
    url: str | None,
    state: ServerState | None = None,
    metrics: socket.socket | None = None,
) -> int:
    """Answer HTTP on `listeners` until told to stop; the exit code. `url` is None in one of several
    processes, which leaves telling the world to its supervisor. `metrics`: where /metrics has a
    port of its own."""
    began = time.monotonic()
    starting = asyncio.create_task(engine.launch())
    # The engine's process starts while this one still imports its routes.
    app = await asyncio.to_thread(_app, config)
    from jaxengine.server.metrics_port import metrics_served

    if state is not None:
        app.state.server = state
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSE_GRACE,
            http=BoundedProtocol,
            ws="none",
            **sockets.tls_options(config.server),
        )
    )
    server.stopping = asyncio.Event()
    server.loop = asyncio.get_running_loop()
    server.engine = engine
    server.supervised = url is None
    if url is not None:
        log.info("listening on %s; loading %s", url, config.model.model)
    serving = asyncio.create_task(server.serve(sockets=listeners))
    async with metrics_served(metrics, app.state.server):
        try:
            return await _run(
                config, engine, app.state.server, server, url, serving, starting, began
            )
        finally:
            server.should_exit = True
            await serving  # raises what ended it


def _app(config: EngineConfig) -> FastAPI:
    from jaxengine.server.app import build_app

    return build_app(None, config)


async def _run(
    config: EngineConfig,
    engine: AsyncLLM,
    state: ServerState,
    server: _Server,
    url: str | None,
    serving: asyncio.Task[None],
    starting: asyncio.Task[None],
    began: float,
) -> int:
    """`serving` ends when the server was told to, or cannot go on."""
    stop = asyncio.create_task(server.stopping.wait())
    await asyncio.wait({stop, starting, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # told to stop while loading
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0 if stop.done() else EXIT_ERROR
    try:
        starting.result()
    except EngineStartError as error:
        stop.cancel()
        return start_failed(error) if url is not None else EXIT_ERROR
    except (ValueError, OSError) as error:
        stop.cancel()
        print(f"jaxengine: {error}", file=sys.stderr)
        return EXIT_USAGE
    state.engine = engine
    describe(engine.metrics, config, engine.ready)
    if config.server.otlp_traces_endpoint is not None:
        engine.metrics.tracer = Tracer(config.server.otlp_traces_endpoint)
    if url is not None:
        announce(config, engine.ready, len(engine.board.ranks), url, began)
    status = None
    if url is not None and not config.server.disable_log_stats:
        status = asyncio.create_task(log_status(engine.metrics))
    if state.serving is not None:
        await state.serving()
    dead = asyncio.create_task(engine.wait_dead())
    await asyncio.wait({stop, dead, serving}, return_when=asyncio.FIRST_COMPLETED)
    code = 0 if stop.done() else EXIT_ERROR
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
    if engine.metrics.tracer is not None:
        await asyncio.to_thread(engine.metrics.tracer.close)
    return code


def start_failed(error: EngineStartError) -> int:
    """Say why the engine did not start; the exit code."""
    if not error.user_error and error.trace:
        print(error.trace, file=sys.stderr)
    print(f"jaxengine: {error}", file=sys.stderr)
    return EXIT_USAGE if error.user_error else EXIT_ERROR


def announce(
    config: EngineConfig, ready: EngineReady, num_engines: int, url: str, began: float
) -> None:
    """The start-up table, and the line that says that requests are taken."""
    log.info("ready:\n%s", startup_table(ready, num_engines, began))
    name = config.server.served_model_name or config.model.model
    print(f"jaxengine serves {name} at {url}", flush=True)


def describe(metrics: Metrics, config: EngineConfig, ready: EngineReady) -> None:
    """What the metrics say of the caches."""
    cache = config.cache
    metrics.describe(
        {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks),
            "cache_dtype": ready.info.get("KV dtype", "auto"),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "max_model_len": str(ready.max_model_len),
        }
    )


def startup_table(ready: EngineReady, num_engines: int, began: float) -> str:
    """Lines of name and value: what the engine reports (weights, KV cache, programs), and seconds
    since `began` (time.monotonic)."""
    rows = {"engines": str(num_engines), "context": f"{ready.max_model_len} tokens"}
    rows["KV blocks"] = f"{ready.num_blocks} of {ready.block_size} tokens"
    rows["KV tokens"] = str(ready.num_blocks * ready.block_size)
    rows |= {name: value for name, value in ready.info.items() if name not in rows}
    rows["start"] = f"{time.monotonic() - began:.1f} seconds"
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())
