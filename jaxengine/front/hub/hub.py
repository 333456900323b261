"""The supervisor's side: owns the engines, passes on what API processes and engines say.

It places sequences (it alone knows all loads), bounds what waits, and remembers whose each sequence
is. It neither tokenizes nor detokenizes; that is what the API processes are for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

import zmq
import zmq.asyncio

from jaxengine.config import EngineConfig
from jaxengine.engine.fault.silence import TICK, Silence
from jaxengine.front.admission import OverloadedError, UnavailableError, WaitingRoom
from jaxengine.front.client import EngineDeadError
from jaxengine.front.hub import messages as hub
from jaxengine.front.ranks.balancer import Placement
from jaxengine.front.ranks.group import EngineGroup
from jaxengine.metrics.prometheus import Metrics
from jaxengine.settings.fault import silence_limit
from jaxengine.validation import RequestError
from jaxengine.wire.messages import (
    OVERLOADED,
    UNAVAILABLE,
    EngineOutput,
    EngineOutputs,
    EngineReady,
    UtilityCall,
    UtilityResult,
)

log = logging.getLogger(__name__)

_COLLECT_SECONDS = 1.0  # that a busy API process gets to report its metrics

Merge = Callable[[bytes, list[bytes]], bytes]


class Hub:
    """Used by one event loop. `merge` makes one text of the engines' metrics and the API
    processes' own."""

    def __init__(self, config: EngineConfig, core: str, metrics: Metrics, merge: Merge) -> None:
        """Raises ValueError for settings that do not go together."""
        self.group = EngineGroup(config, metrics.health, core)
        self.metrics = metrics
        self._merge = merge
        self._waiting = WaitingRoom(config.scheduler)
        self._unstarted: dict[str, int] = {}  # sequence -> its prompt's tokens
        self._owners: dict[str, bytes] = {}  # sequence -> its API process
        self._clients: set[bytes] = set()
        self._serving: dict[bytes, Silence] = {}
        self._silence_limit = silence_limit(config.fault)
        self._expected = config.server.api_server_count
        self.all_serve = asyncio.Event()  # every API process takes requests
        self._reports: dict[bytes, hub.Report] = {}
        self._silent: set[bytes] = set()  # asked for a report that has not come
        self._reported = asyncio.Event()
        self._collecting = asyncio.Lock()  # by one at a time
        self._ready: EngineReady | None = None
        self._dead: hub.Dead | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._folder: str | None = tempfile.mkdtemp(prefix="jaxengine-hub-")
        self.address = f"ipc://{self._folder}/hub"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(self.address)

    async def start(self) -> EngineReady:
        """Start the engines, and tell the API processes. Raises EngineStartError."""
        self._listening = asyncio.create_task(self._listen())
        self._tasks.add(self._listening)
        self._listening.add_done_callback(self._done)
        ready = await self.group.start()
        self._ready = ready
        for client in self._clients:
            self._send(client, hub.READY, ready)
        return ready

    async def run(self) -> None:
        """Pass messages on until the engines are gone: raises EngineDeadError, after the API
        processes were told."""
        try:
            await self._while_listening(self.group.run(self._take))
        except EngineDeadError as error:
            self.metrics.engine_gone()
            self._dead = hub.Dead(str(error), error.kind)
            for client in self._clients:
                self._send(client, hub.DEAD, self._dead)
            raise

    async def _while_listening(self, work: Coroutine[Any, Any, None]) -> None:
        """`work`, which is in vain once nobody hears the API processes any more, or one of them
        stands still."""
        assert self._listening is not None
        running, watching = asyncio.ensure_future(work), asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait(
                {running, watching, self._listening}, return_when=asyncio.FIRST_COMPLETED
            )
            if self._listening.done() and not running.done():
                error = self._listening.exception()
                raise EngineDeadError(f"the hub failed: {type(error).__name__}: {error}")
            for task in (running, watching):
                if task.done():
                    task.result()
        finally:
            running.cancel()
            watching.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)

    async def _watch(self) -> None:
        """An API process that stands still is as one that died: its share of all connections would
        wait for ever."""
        while True:
            await asyncio.sleep(TICK)
            self.look()

    def look(self) -> None:
        """Ask all that serve for a sign of life. Raises EngineDeadError when one has been owed for
        too long."""
        limit = self._silence_limit
        for client, silence in self._serving.items():
            if silence.look(functools.partial(self._send, client, hub.PING, None)) >= limit:
                raise EngineDeadError(
                    f"{_process(client)} said nothing for {limit:g} s; the server ends",
                    "ApiProcessSilent",
                )

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the hub failed", exc_info=task.exception())

    def _send(self, client: bytes, kind: bytes, message: Any) -> None:
        self._socket.send_multipart([client, kind, hub.encode(message)])

    # -- engines to API processes ----------------------------------------------------------------

    async def _take(self, rank: int, message: EngineOutputs) -> None:
        parts: dict[bytes, list[EngineOutput]] = {}
        tokens = 0
        for output in message.outputs:
            self._started(output.request_id)
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue
            tokens += len(output.new_token_ids)
            parts.setdefault(owner, []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        self.metrics.totals.generation_tokens += tokens
        if message.stats is not None:
            self.metrics.stats(message.stats, rank)
        for client in self._clients if message.stats is not None else parts:
            outputs = parts.get(client, [])
            self._send(client, hub.OUTPUTS, EngineOutputs(rank, outputs, message.stats))

    def _started(self, request_id: str) -> None:
        length = self._unstarted.pop(request_id, None)
        if length is not None:
            self._waiting.leave(length)

    # -- API processes to engines ----------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            client, *frames = await self._socket.recv_multipart()
            if (silence := self._serving.get(client)) is not None:
                silence.heard()
            try:
                kind, payload = frames
                self._handle(client, kind, payload)
            except Exception:  # one that makes no sense must not keep others from being heard
                log.exception("a message of %s was dropped", _process(client))

    def _handle(self, client: bytes, kind: bytes, payload: bytes) -> None:
        if kind == hub.ADD:
            self._add(client, payload)
        elif kind == hub.ABORT:
            self._abort(hub.decode_ids(payload))
        elif kind == hub.CALL:
            self._spawn(self._call(client, hub.decode_call(payload)))
        elif kind == hub.REPORT:
            self._reports[client] = hub.decode_report(payload)
            self._silent.discard(client)
            if not self._silent:
                self._reported.set()
        elif kind == hub.HELLO:
            self._clients.add(client)
            if len(self._clients) == self._expected:
                self._remove_folder()  # all are connected: nothing is left after a kill -9
            if self._ready is not None:
                self._send(client, hub.READY, self._ready)
            if self._dead is not None:
                self._send(client, hub.DEAD, self._dead)

    def _add(self, client: bytes, payload: bytes) -> None:
        """Whatever goes wrong with sequences is told to whoever waits for it."""
        try:
            self._place(client, hub.decode_add(payload))
        except (OverloadedError, UnavailableError, EngineDeadError, RequestError) as error:
            reason = UNAVAILABLE
            if isinstance(error, OverloadedError):
                self.metrics.rejected()
                reason = OVERLOADED
            self._refuse(client, payload, str(error), reason)
        except Exception as error:
            log.exception("a request of %s could not be placed", _process(client))
            self._refuse(client, payload, f"{type(error).__name__}: {error}", None)

    def _place(self, client: bytes, add: hub.Add) -> None:
        requests, length = add.siblings.requests(), len(add.siblings.first.prompt_token_ids)
        self._waiting.check(length)
        names = add.siblings.ids()
        try:
            self.group.placer.add(requests, Placement(add.rank, add.session))
        except BaseException:
            self.group.placer.abort(names)  # some may have been sent
            raise
        for name in names:
            self._owners[name] = client
            self._unstarted[name] = length
            self._waiting.enter(length)
        self.metrics.totals.prompt_tokens += length * len(names)

    def _refuse(self, client: bytes, payload: bytes, error: str, reason: str | None) -> None:
        ends = [
            EngineOutput(name, [], finish_reason="error", stop_reason=reason, error=error)
            for name in hub.names_of(payload)
        ]
        if ends:  # else nobody can be told
            self._send(client, hub.OUTPUTS, EngineOutputs(0, ends))

    def _abort(self, request_ids: list[str]) -> None:
        known = [r for r in request_ids if self._owners.pop(r, None) is not None]
        for request_id in known:
            self._started(request_id)
        self.group.placer.abort(known)

    async def _call(self, client: bytes, call: UtilityCall) -> None:
        result = UtilityResult(call.call_id)
        try:
            if call.method == hub.SERVING:
                self._serving.setdefault(client, Silence())
                if len(self._serving) == self._expected:
                    self.all_serve.set()
            elif call.method == hub.FIGURES:
                result.result = await self._figures()
            else:
                result.result = await self.group.call(call.method, *call.args)
        except (RuntimeError, EngineDeadError, UnavailableError) as error:
            result.error = str(error)
        except Exception as error:
            log.exception("the call %s failed", call.method)
            result = UtilityResult(call.call_id, error=f"{type(error).__name__}: {error}")
        self._send(client, hub.RESULT, result)

    async def _figures(self) -> hub.Figures:
        """Of all processes; of one that does not answer in time, what it said last."""
        async with self._collecting:
            self._silent = set(self._clients)
            for client in self._clients:
                self._send(client, hub.COLLECT, None)
            self._reported.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reported.wait(), _COLLECT_SECONDS)
        reports = list(self._reports.values())
        text = self._merge(self.metrics.render(), [report.text for report in reports])
        return hub.Figures(text, sum(report.num_requests for report in reports))

    # -- the end ---------------------------------------------------------------------------------

    async def close(self, grace: float = 5.0) -> None:
        """Stop the engines. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.group.close(grace)
        if not self._socket.closed:
            self._socket.close(linger=200)
            self._context.term()
        self._remove_folder()

    def kill(self) -> None:
        """End the engines at once."""
        self.group.kill()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _process(client: bytes) -> str:
    return f"API process {int.from_bytes(client, 'little')}"
