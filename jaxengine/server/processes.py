"""`serve --api-server-count N`: N processes answer HTTP, tokenize and detokenize; this one owns the
engines and passes messages on (`front.hub`).

Over TCP each process has a socket of its own on the same port, and the kernel spreads connections
over them. When one process ends unasked, all end.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess

from jaxengine.config import EngineConfig
from jaxengine.engine.process import setup_child_logging
from jaxengine.executor.parent import tie_to_parent
from jaxengine.front.async_llm import AsyncLLM, EngineStartError, served_name
from jaxengine.front.hub.hub import Hub
from jaxengine.front.hub.messages import SERVING, Report
from jaxengine.front.hub.remote import RemoteGroup
from jaxengine.metrics.merge import merge_texts
from jaxengine.metrics.prometheus import Metrics
from jaxengine.metrics.status import log_status
from jaxengine.server import sockets
from jaxengine.server.http_metrics import HttpMetrics
from jaxengine.server.run import (
    CLOSE_GRACE,
    DEATH_GRACE,
    EXIT_ERROR,
    announce,
    answer,
    describe,
    start_failed,
    uvicorn_loop,
)
from jaxengine.server.state import ServerState
from jaxengine.settings.ranks import local_ranks

log = logging.getLogger(__name__)

_LAST_WORDS = 2.0  # seconds in which other processes may end by themselves


@dataclass(frozen=True)
class ApiLaunch:
    """What an API process is told."""

    config: EngineConfig
    listeners: sockets.Listeners
    address: str
    index: int
    parent_pid: int
    metrics: socket.socket | None = None  # where /metrics has a port of its own


# -- an API process ------------------------------------------------------------------------------


def run_api(launch: ApiLaunch) -> None:
    """Entry of an API process."""
    tie_to_parent(launch.parent_pid)
    setup_child_logging(launch.config, f"api{launch.index}")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if launch.config.server.disable_access_log:
        logging.getLogger("jaxengine.access").setLevel(logging.WARNING)
    for listener in launch.listeners:
        listener.setblocking(False)
    sys.exit(uvicorn_loop().run(_answer(launch)))


async def _answer(launch: ApiLaunch) -> int:
    # what waits is counted where all of it is known
    scheduler = replace(
        launch.config.scheduler, max_num_queued_reqs=None, max_num_queued_tokens=None
    )
    config = replace(launch.config, scheduler=scheduler)
    made: list[RemoteGroup] = []
    http = HttpMetrics()

    def group(engine: AsyncLLM) -> RemoteGroup:
        def report() -> Report:
            return Report(engine.metrics.render() + http.render(), engine.num_requests)

        made.append(
            RemoteGroup(config, engine.metrics.health, launch.address, launch.index, report)
        )
        return made[0]

    engine = AsyncLLM(config, group=group)

    async def serving() -> None:
        await made[0].call(SERVING)

    state = ServerState(launch.config, http=http, figures=made[0].figures, serving=serving)
    return await answer(config, launch.listeners, engine, None, state, launch.metrics)


# -- the supervisor ------------------------------------------------------------------------------


class _Children:
    """The API processes."""

    def __init__(
        self,
        config: EngineConfig,
        processes: list[sockets.Listeners],
        address: str,
        metrics: socket.socket | None,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.gone = asyncio.Event()  # one has ended
        self._all: list[BaseProcess] = []
        for index, listeners in enumerate(processes):
            own = metrics if index == 0 else None
            launch = ApiLaunch(config, listeners, address, index, os.getpid(), own)
            child = spawn.Process(target=run_api, args=(launch,), name=f"jaxengine-api{index}")
            child.start()
            self._all.append(child)
            asyncio.get_running_loop().add_reader(child.sentinel, self._ended, child)

    def _ended(self, child: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(child.sentinel)
        self.gone.set()

    def exit_code(self) -> int:
        """Of one that failed; 1 when none says why."""
        codes = [c.exitcode for c in self._all if c.exitcode not in (None, 0)]
        return codes[0] if codes and codes[0] is not None and codes[0] > 0 else EXIT_ERROR

    async def end(self, seconds: float, ask: bool = True) -> None:
        """Wait for all to end, asked to (their drain) or not; then end them."""
        if ask:
            for child in self._all:
                child.terminate()
        deadline = time.monotonic() + seconds
        while any(c.is_alive() for c in self._all) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.kill()
        for child in self._all:
            asyncio.get_running_loop().remove_reader(child.sentinel)
            child.join(5)

    def kill(self) -> None:
        for child in self._all:
            if child.is_alive():
                child.kill()


async def supervise(
    config: EngineConfig,
    core: str,
    listeners: list[sockets.Listeners],
    metrics_socket: socket.socket | None = None,
) -> int:
    """Run engines and API processes until told to stop; the exit code."""
    began = time.monotonic()
    url = sockets.url_of(listeners[0][0], config.server)
    log.info("listening on %s in %d processes; loading %s", url, len(listeners), config.model.model)
    length = config.model.max_model_len or 131072
    metrics = Metrics(served_name(config), length, local_ranks(config.data_parallel))
    hub = Hub(config, core, metrics, merge_texts)
    stop = asyncio.Event()
    children = _Children(config, listeners, hub.address, metrics_socket)
    signals = 0

    def on_signal(number: int) -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:  # everything ends at once
            hub.kill()
            children.kill()
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    drain = config.server.shutdown_timeout + CLOSE_GRACE + 5
    stopped = asyncio.create_task(stop.wait())
    lost = asyncio.create_task(children.gone.wait())
    starting = asyncio.create_task(hub.start())
    tasks: list[asyncio.Task[None]] = []
    try:
        await asyncio.wait({stopped, lost, starting}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return 0
        if starting.done():
            try:
                ready = starting.result()
            except EngineStartError as error:
                return start_failed(error)
            describe(metrics, config, ready)
            tasks.append(asyncio.create_task(hub.run()))
            all_serve = asyncio.create_task(_wait(hub.all_serve))
            tasks.append(all_serve)
            await asyncio.wait(
                {stopped, lost, tasks[0], all_serve}, return_when=asyncio.FIRST_COMPLETED
            )
            if all_serve.done():
                announce(config, ready, len(hub.group.ranks), url, began)
                if not config.server.disable_log_stats:
                    tasks.append(asyncio.create_task(log_status(metrics)))
                await asyncio.wait({stopped, lost, tasks[0]}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await children.end(drain)
                return 0
            if tasks[0].done():
                log.error("%s", tasks[0].exception())
                await children.end(DEATH_GRACE + CLOSE_GRACE + 5, ask=False)
                return EXIT_ERROR
        await children.end(_LAST_WORDS, ask=False)  # the others may have met the same
        log.error("an API process has ended (exit code %d); the server ends", children.exit_code())
        return children.exit_code()
    finally:
        for task in (*tasks, stopped, lost, starting):
            task.cancel()
        await asyncio.gather(*tasks, stopped, lost, starting, return_exceptions=True)
        await children.end(CLOSE_GRACE + 2)
        await hub.close()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
