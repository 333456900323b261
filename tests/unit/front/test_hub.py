"""The hub between API processes and engines, without processes: both ends in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes import Tally, request

from jaxengine.config import EngineConfig
from jaxengine.front.client import EngineDeadError
from jaxengine.front.hub import hub as hub_module
from jaxengine.front.hub import messages as hub
from jaxengine.front.hub.hub import Hub
from jaxengine.front.hub.remote import RemoteGroup
from jaxengine.front.ranks.balancer import ANYWHERE, Placement
from jaxengine.metrics.prometheus import Metrics
from jaxengine.wire import frames as wire
from jaxengine.wire.messages import (
    EngineOutput,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    Siblings,
)

CONFIG = EngineConfig.of(api_server_count=2, max_num_queued_reqs=4)


class FakeGroup:
    """Engines that are none. `breaks`: prompts whose placement fails in a way nobody foresaw."""

    def __init__(self) -> None:
        self.added: list[EngineRequest] = []
        self.breaks: list[list[int]] = []
        self.placer = self

    async def start(self) -> EngineReady:
        return EngineReady(0, 128, 10, 16, 320)

    async def run(self, take: Callable[[int, EngineOutputs], Awaitable[None]]) -> None:
        await asyncio.Event().wait()

    def add(self, requests: list[EngineRequest], placement: Placement = ANYWHERE) -> list[int]:
        if requests[0].prompt_token_ids in self.breaks:
            raise ValueError("no rank has an even number")
        self.added += requests
        return [0] * len(requests)

    def abort(self, request_ids: list[str]) -> None:
        pass

    async def call(self, method: str, *args: Any) -> Any:
        return True

    async def close(self, grace: float = 5.0) -> None:
        pass


class Api:
    """An API process's end."""

    def __init__(self, address: str, index: int) -> None:
        self.group = RemoteGroup(CONFIG, Tally(), address, index, self._report)
        self.got: list[EngineOutput] = []
        self.task: asyncio.Task[None] | None = None

    def _report(self) -> hub.Report:
        return hub.Report(b"", 0)

    async def begin(self) -> None:
        await self.group.start()
        await self.serve()

    async def serve(self) -> None:
        self.task = asyncio.create_task(self.group.run(self._take))
        await self.group.call(hub.SERVING)

    async def _take(self, rank: int, message: EngineOutputs) -> None:
        self.got += message.outputs

    async def end_of(self, name: str) -> EngineOutput:
        def ends() -> list[EngineOutput]:
            return [o for o in self.got if o.request_id == name]

        await until(lambda: ends() and ends()[0].finish_reason)
        return ends()[0]


class Rig:
    def __init__(self) -> None:
        metrics = Metrics("demo", 128, range(1))
        self.hub = Hub(CONFIG, wire.STUB_CORE, metrics, lambda text, _: text)
        self.engines = FakeGroup()
        self.hub.group = self.engines  # type: ignore[assignment]
        self.folder = Path(self.hub.address.removeprefix("ipc://")).parent
        self.apis = [Api(self.hub.address, i) for i in range(2)]
        self.running: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        await self.hub.start()
        self.running = asyncio.create_task(self.hub.run())
        for api in self.apis:
            await api.begin()
        await self.hub.all_serve.wait()


@contextlib.asynccontextmanager
async def running(begin: bool = True) -> AsyncIterator[Rig]:
    rig = Rig()
    try:
        if begin:
            async with asyncio.timeout(30):
                await rig.begin()
        yield rig
    finally:
        tasks = [task for task in (rig.running, *(api.task for api in rig.apis)) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for api in rig.apis:
            await api.group.close()
        await rig.hub.close()


async def until(check: Any) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.005)


async def test_what_breaks_for_one_request_ends_that_one() -> None:
    """H1: nothing of it is kept, and everybody else is heard."""
    async with running() as rig:
        one, two = rig.apis
        rig.engines.breaks = [[6, 6]]
        for number in range(6):  # more than may wait
            one.group.placer.add([request(f"odd{number}", [6, 6])])
            end = await one.end_of(f"odd{number}")
            assert (end.finish_reason, end.stop_reason) == ("error", None)
            assert end.error == "ValueError: no rank has an even number"
        assert not rig.hub._owners and not rig.hub._unstarted
        assert (rig.hub._waiting.num_requests, rig.hub._waiting.num_tokens) == (0, 0)
        assert rig.hub.metrics.totals.prompt_tokens == 0

        for api, name in ((one, "a"), (two, "b")):
            api.group.placer.add([request(name)])
        await until(lambda: len(rig.engines.added) == 2)
        await rig.hub._take(0, EngineOutputs(0, [EngineOutput("a", [5], finish_reason="stop")]))
        assert (await one.end_of("a")).new_token_ids == [5]


async def test_messages_that_make_no_sense() -> None:
    """An unreadable request is answered where its id can be read; the rest is dropped."""
    async with running() as rig:
        one, two = rig.apis
        sent = msgspec.to_builtins(hub.Add(Siblings(request("bad"))))
        sent[0][0]["prompt_token_ids"] = ["six"]
        one.group._send(hub.ADD, msgspec.msgpack.encode(sent))
        end = await one.end_of("bad")
        assert end.finish_reason == "error" and "prompt_token_ids" in str(end.error)
        for kind in (hub.ADD, hub.ABORT, hub.CALL, hub.REPORT):
            one.group._send(kind, b"\xc1")
        assert one.group._socket is not None
        one.group._socket.send_multipart([b"one frame"])
        assert await two.group.call("reset_prefix_cache") is True
        one.group.placer.add([request("good")])
        await until(lambda: [r.request_id for r in rig.engines.added] == ["good"])


async def test_the_folder_is_gone_once_all_are_connected() -> None:
    """L4: nothing is left when the supervisor is killed."""
    async with running(begin=False) as rig:
        assert rig.folder.exists()
        await rig.hub.start()
        await rig.apis[0].group.start()
        assert rig.folder.exists()  # one is still to come
        await rig.apis[1].group.start()
        assert not rig.folder.exists()
        await asyncio.wait_for(rig.apis[0].serve(), 20)  # what is connected stays so
    async with running(begin=False) as rig:
        pass
    assert not rig.folder.exists()


async def test_an_api_process_that_stands_still_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "TICK", 0.05)
    async with running() as rig:
        one, two = rig.apis
        rig.hub._silence_limit = 60
        pings = 0
        send = rig.hub._send

        def counting(client: bytes, kind: bytes, message: Any) -> None:
            nonlocal pings
            pings += kind == hub.PING
            send(client, kind, message)

        monkeypatch.setattr(rig.hub, "_send", counting)
        await until(lambda: pings >= 60)  # 30 each: who owes an answer is asked no more
        assert rig.running is not None and one.task is not None and two.task is not None
        assert not rig.running.done()
        two.task.cancel()  # nobody reads what is sent there
        with pytest.raises(EngineDeadError, match="API process 1 said nothing for 60 s"):
            await asyncio.wait_for(rig.running, 60)
        with pytest.raises(EngineDeadError, match="API process 1"):
            await asyncio.wait_for(one.task, 60)


async def test_a_supervisor_that_stands_still_is_noticed() -> None:
    async with running() as rig:
        one = rig.apis[0].group
        for _ in range(5):
            for _ in range(250):
                one.look()
            before = one._silence.seconds
            rig.hub.look()  # it asks for a sign of life, and so gives one
            await until(lambda: one._silence.seconds < 200)  # noqa: B023
            assert before >= 249
        with pytest.raises(EngineDeadError, match="the supervisor said nothing for 300 s"):
            for _ in range(302):
                one.look()
