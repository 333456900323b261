"""Engine processes that are none: what a group sends is kept, what it receives is put."""

from __future__ import annotations

import asyncio
from typing import Any

from jaxengine.config import EngineConfig
from jaxengine.front.client import EngineClient, EngineDeadError, EngineStartError
from jaxengine.front.ranks.balancer import ANYWHERE, Placement
from jaxengine.front.ranks.placing import Placer
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import (
    EngineOutput,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    FaultToleranceRequest,
    FaultToleranceResult,
    RankStatus,
)


class FakeClient(EngineClient):
    def __init__(self, rank: int, fleet: Fleet) -> None:
        super().__init__(EngineConfig(), index=rank, on_status=fleet.status)
        self.rank = rank
        self.fleet = fleet
        self.up = True
        self.quiet = False  # it stands still
        self.pings = 0
        self.inbox: asyncio.Queue[EngineOutputs | Exception] = asyncio.Queue()
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.answers: dict[str, Any] = {}

    @property
    def alive(self) -> bool:
        return self.up

    async def start(self) -> EngineReady:
        await asyncio.sleep(0)
        if self.fleet.broken:
            raise EngineStartError("no device was found")
        return EngineReady(self.rank, 128, 10, 16, 320)

    async def receive(self) -> EngineOutputs:
        message = await self.inbox.get()
        if isinstance(message, Exception):
            raise message
        self._silence.heard()
        return message

    def ping(self) -> None:
        self.pings += 1
        if not self.quiet:
            self._silence.heard()

    def give_up(self, why: EngineDeadError) -> None:
        self.up = False
        self.inbox.put_nowait(why)

    def add(self, requests: list[EngineRequest]) -> None:
        if not self.up:
            raise EngineDeadError("gone")
        self.added += requests

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def call(self, method: str, *args: Any) -> Any:
        answer = self.answers.get(method, True)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def order(self, request: FaultToleranceRequest) -> FaultToleranceResult:
        self.fleet.status(RankStatus(self.rank, "healthy", epoch=1))
        return FaultToleranceResult(request.request_id, self.rank, True)

    async def close(self, grace: float = 5.0) -> None:
        self.up = False

    def say(self, *outputs: EngineOutput) -> None:
        self.inbox.put_nowait(EngineOutputs(self.rank, list(outputs)))

    def die(self) -> None:
        self.up, self.quiet = False, True
        self.inbox.put_nowait(EngineDeadError("killed"))


class Fleet:
    """Makes clients; the latest of each rank is in `clients`."""

    def __init__(self) -> None:
        self.clients: dict[int, FakeClient] = {}
        self.broken = False
        self.status: Any = None

    def make(self, rank: int) -> FakeClient:
        client = self.clients[rank] = FakeClient(rank, self)
        return client


class Tally:
    """A watcher that counts."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def state(self, rank: int, state: str) -> None:
        self.events.append(("state", rank, state))

    def fault(self, rank: int, kind: str) -> None:
        self.events.append(("fault", rank, kind))

    def recovery(self, rank: int, ok: bool) -> None:
        self.events.append(("recovery", rank, ok))

    def aborted(self, rank: int) -> None:
        self.events.append(("aborted", rank))

    def replayed(self, rank: int) -> None:
        self.events.append(("replayed", rank))


def request(name: str, prompt: list[int] | None = None, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3] if prompt is None else prompt,
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | params),
        arrival_time=0.0,
    )


def add_one(placer: Placer, one: EngineRequest, placement: Placement = ANYWHERE) -> int:
    """Send one sequence; returns its rank."""
    [rank] = placer.add([one], placement)
    return rank
