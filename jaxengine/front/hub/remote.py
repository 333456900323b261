"""The engines as an API process sees them: the face of `EngineGroup`, through the supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from jaxengine.config import EngineConfig
from jaxengine.engine.fault.silence import TICK, Silence
from jaxengine.front.client import EngineDeadError, EngineStartError
from jaxengine.front.hub import messages as hub
from jaxengine.front.messages_in import answer_call, fail_all
from jaxengine.front.ranks.balancer import ANYWHERE, Placement
from jaxengine.front.ranks.placing import Placer, Watcher
from jaxengine.settings.fault import silence_limit
from jaxengine.settings.ranks import local_ranks
from jaxengine.wire.health import HEALTHY, Board
from jaxengine.wire.messages import (
    EngineOutputs,
    EngineReady,
    EngineRequest,
    FaultToleranceRequest,
    FaultToleranceResult,
    RankStatus,
    Siblings,
    UtilityCall,
)

Send = Callable[[bytes, bytes], None]


class RemotePlacer:
    """Sends sequences to the supervisor, which places them."""

    def __init__(self, send: Send, placer: Placer) -> None:
        self._send = send
        self.check = placer.check
        self._first = min(placer.balancer.loads) if placer.balancer.loads else 0

    def add(self, requests: list[EngineRequest], placement: Placement = ANYWHERE) -> list[int]:
        """Send them; returns for each the rank that was asked for, else the first: the supervisor
        chooses."""
        self.check(placement)
        add = hub.Add(Siblings.of(requests), placement.rank, placement.session)
        self._send(hub.ADD, hub.encode(add))
        return [self._first if placement.rank is None else placement.rank] * len(requests)

    def abort(self, request_ids: list[str]) -> None:
        """Idempotent."""
        if request_ids:
            self._send(hub.ABORT, hub.encode(request_ids))


class RemoteGroup:
    """Used by one event loop. `report` gives this process's own metrics when they are asked for."""

    def __init__(
        self,
        config: EngineConfig,
        watcher: Watcher,
        address: str,
        index: int,
        report: Callable[[], hub.Report],
    ) -> None:
        self.ranks = local_ranks(config.data_parallel)
        self.board = Board(self.ranks, lambda rank, _, state: watcher.state(rank, state))
        self.placer = RemotePlacer(self._send, Placer(config, {}, self.board, watcher))
        self._address = address
        self._identity = index.to_bytes(2, "little")
        self._report = report
        self._silence = Silence()
        self._silence_limit = silence_limit(config.fault)
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0

    async def start(self) -> EngineReady:
        """Wait until the supervisor's engines can serve. Raises EngineStartError."""
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.connect(self._address)
        self._send(hub.HELLO, b"")
        while True:
            kind, payload = await self._socket.recv_multipart()
            if kind == hub.DEAD:
                raise EngineStartError(hub.decode_dead(payload).message)
            if kind == hub.READY:
                break
        for rank in self.ranks:
            self.board.update(RankStatus(rank, HEALTHY, since=time.time()))
        return hub.decode_ready(payload)

    async def run(self, take: Callable[[int, EngineOutputs], Awaitable[None]]) -> None:
        """Hand what comes to `take`; raises EngineDeadError when the engines are gone, or the
        supervisor stands still."""
        tasks = [asyncio.ensure_future(work) for work in (self._receive(take), self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, take: Callable[[int, EngineOutputs], Awaitable[None]]) -> None:
        assert self._socket is not None
        while True:
            kind, payload = await self._socket.recv_multipart()
            self._silence.heard()
            if kind == hub.OUTPUTS:
                news = hub.decode_outputs(payload)
                await take(news.engine_index, news)
            elif kind == hub.RESULT:
                answer_call(self._calls, hub.decode_result(payload))
            elif kind == hub.PING:
                self._send(hub.PONG, b"")
            elif kind == hub.COLLECT:
                self._send(hub.REPORT, hub.encode(self._report()))
            elif kind == hub.DEAD:
                dead = hub.decode_dead(payload)
                raise EngineDeadError(dead.message, dead.kind)

    async def _watch(self) -> None:
        """The supervisor asks for a sign of life all the time, which is one of its own."""
        while True:
            await asyncio.sleep(TICK)
            self.look()

    def look(self) -> None:
        """Raises EngineDeadError when the supervisor has said nothing for too long."""
        if self._silence.look(lambda: None) >= self._silence_limit:
            raise EngineDeadError(
                f"the supervisor said nothing for {self._silence_limit:g} s", "SupervisorSilent"
            )

    def _send(self, kind: bytes, payload: bytes) -> None:
        if self._socket is None or self._socket.closed:
            raise EngineDeadError("the engine is shut down")
        self._socket.send_multipart([kind, payload])  # without a high-water mark it is done at once

    async def call(self, method: str, *args: Any) -> Any:
        """Run `method` on every engine. Raises RuntimeError with the engine's message."""
        self._next_call += 1
        call_id = self._next_call  # others may call meanwhile
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(hub.CALL, hub.encode(UtilityCall(call_id, method, list(args))))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def figures(self) -> hub.Figures:
        """Metrics and load of all API processes together."""
        return msgspec.convert(await self.call(hub.FIGURES), hub.Figures)

    def fail_calls(self, error: Exception) -> None:
        """End every waiting `call` with `error`."""
        fail_all(self._calls.values(), error)

    async def order(self, rank: int, order: FaultToleranceRequest) -> FaultToleranceResult:
        """Fault tolerance has one API process."""
        reason = "orders are not taken with --api-server-count above 1"
        return FaultToleranceResult(order.request_id, rank, False, reason)

    @property
    def pid(self) -> int | None:
        """The engines are the supervisor's children."""
        return None

    def pids(self) -> dict[int, int | None]:
        return dict.fromkeys(self.ranks)

    async def close(self, grace: float = 5.0) -> None:
        """Say nothing more; the engines live on. Idempotent."""
        self.fail_calls(EngineDeadError("the engine is shut down"))
        if self._socket is not None and not self._socket.closed:
            self._socket.close(linger=200)  # last aborts still get out
        self._context.term()

    def kill(self) -> None:
        """The engines are the supervisor's."""
