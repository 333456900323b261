"""The front's side of ranks that share experts, without processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes import FakeClient, Fleet, Tally, request

from jaxengine.config import EngineConfig
from jaxengine.front.admission import UnavailableError
from jaxengine.front.client import EngineStartError
from jaxengine.front.ranks import coupled
from jaxengine.front.ranks.group import EngineGroup
from jaxengine.front.ranks.orders import Order, Orders
from jaxengine.wire import frames as wire
from jaxengine.wire.messages import (
    EngineOutput,
    EngineOutputs,
    EngineReady,
    FaultToleranceRequest,
    FaultToleranceResult,
    RankStatus,
)


class CoupledClient(FakeClient):
    """`deaf`: its loop hangs; `refuses`: it cannot join a new group."""

    def __init__(self, rank: int, fleet: Fleet) -> None:
        super().__init__(rank, fleet)
        self.woken: list[wire.WaveNotice] = []
        self.broken: list[int] = []
        self.joined: list[int] = []
        self.deaf = False
        self.refuses = False

    def start_wave(self, notice: wire.WaveNotice) -> None:
        self.woken.append(notice)

    def group_broke(self, port: int) -> None:
        self.broken.append(port)
        if not self.deaf and self.up:
            self.fleet.status(RankStatus(self.rank, "dead", fault_info="PeerFailed"))

    async def order(self, request: FaultToleranceRequest) -> FaultToleranceResult:
        await asyncio.sleep(0)
        self.joined.append(request.params["port"])
        if self.refuses:
            return FaultToleranceResult(request.request_id, self.rank, False, "no device")
        self.fleet.status(RankStatus(self.rank, "healthy", epoch=len(self.joined)))
        return FaultToleranceResult(request.request_id, self.rank, True)

    def kill(self) -> None:
        self.die()


class CoupledFleet(Fleet):
    def make(self, rank: int) -> CoupledClient:
        client = CoupledClient(rank, self)
        self.clients[rank] = client
        return client


class Rig:
    def __init__(self, **settings: Any) -> None:
        flat = {
            "data_parallel_size": 3,
            "enable_expert_parallel": True,
            "enable_fault_tolerance": True,
        }
        self.fleet = CoupledFleet()
        self.tally = Tally()
        config = EngineConfig.of(**flat | settings)
        self.group = EngineGroup(config, self.tally, make_client=self.fleet.make)
        self.fleet.status = self.group._on_status
        self.orders = Orders(self.group.board, self.group.order)
        self.ends: list[EngineOutput] = []

    @property
    def ranks(self) -> list[CoupledClient]:
        return [self.fleet.clients[rank] for rank in range(3)]  # type: ignore[misc]

    @property
    def front(self) -> coupled.Coupled:
        assert self.group._coupled is not None
        return self.group._coupled

    def states(self) -> set[str]:
        return {health.state for health in self.group.board.ranks.values()}

    async def take(self, rank: int, message: EngineOutputs) -> None:
        self.ends += [o for o in message.outputs if o.finish_reason is not None]

    async def ordered(self, instruction: str, **params: Any) -> Order:
        order = self.orders.apply({"instruction": instruction, "params": params})
        await until(lambda: order.payload()["status"] == "done")
        return order

    def fail(self, rank: int) -> None:
        self.fleet.status(RankStatus(rank, "dead", fault_info="WorkerDied"))


async def until(check: Any) -> None:
    async with asyncio.timeout(5):
        while not check():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Rig]:
    rig = Rig(**settings)
    await rig.group.start()
    loop = asyncio.create_task(rig.group.run(rig.take))
    await asyncio.sleep(0)
    try:
        yield rig
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await rig.orders.close()
        await rig.group.close()


async def test_work_on_one_rank_wakes_the_others() -> None:
    async with running() as rig:
        front, port = rig.front, rig.front.port
        front.on_wave(1, wire.WaveNotice(port, 0))
        assert [r.woken for r in rig.ranks] == [
            [wire.WaveNotice(port, 0)], [], [wire.WaveNotice(port, 0)]
        ]  # fmt: skip
        front.on_wave(2, wire.WaveNotice(port, 0))  # found work at the same time
        front.on_wave(0, wire.WaveNotice(port, 0, running=False))
        front.on_wave(0, wire.WaveNotice(port - 2, 1))  # of a group that is gone
        assert [len(r.woken) for r in rig.ranks] == [1, 0, 1]
        front.on_wave(0, wire.WaveNotice(port, 1))
        assert [len(r.woken) for r in rig.ranks] == [1, 1, 2]


async def test_all_fail_with_one_and_come_back_together() -> None:
    async with running(retry_aborted_requests=True) as rig:
        port = rig.front.port
        [placed] = rig.group.placer.add([request("a")])
        rig.fail(1)
        assert all(r.broken == [port] for r in rig.ranks)
        assert rig.states() == {"dead"}
        with pytest.raises(UnavailableError):
            rig.group.placer.check()
        # no rank is left to replay it on
        rig.ranks[placed].say(EngineOutput("a", [], finish_reason="abort"))
        await until(lambda: rig.ends)
        assert rig.ends[0].finish_reason == "abort"

        retry = await rig.ordered("retry", rank=1)
        assert "respawn replaces them all" in retry.results[1].reason
        everywhere = await rig.ordered("respawn")  # one recovery answers for all
        assert [r.success for r in everywhere.results.values()] == [True] * 3
        assert rig.states() == {"healthy"} and rig.front.port != port
        assert [r.joined for r in rig.ranks] == [[rig.front.port]] * 3
        again = await rig.ordered("respawn", rank=0)
        assert again.results[0].reason == "rejecting respawn: the engine is healthy"
        extra = await rig.ordered("respawn", rank=0, port=1)
        assert extra.results[0].reason == "params: respawn has no 'port'"


async def test_a_process_that_is_gone_is_started_anew() -> None:
    async with running() as rig:
        first = rig.ranks[2]
        first.die()
        await until(lambda: rig.states() == {"dead"})
        assert (await rig.ordered("respawn", rank=0)).results[0].success
        assert rig.ranks[2] is not first and rig.states() == {"healthy"}
        assert [len(r.joined) for r in rig.ranks] == [1, 1, 0]


async def test_a_rank_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupled, "_GRACE", 0.05)
    async with running() as rig:
        rig.ranks[2].deaf = True
        rig.fail(0)
        assert rig.states() == {"dead", "unhealthy"}
        await until(lambda: rig.states() == {"dead"})
        assert not rig.ranks[2].up


async def test_a_rank_that_stands_still_breaks_the_group() -> None:
    """Nobody has work, so that no other rank waits for it."""
    async with running(fault_tolerance_config={"step_timeout_sec": 3}) as rig:
        port, still = rig.front.port, rig.ranks[2]
        still.quiet = still.deaf = True
        await until(lambda: len(rig.group._watched) == 3)
        for _ in range(4):
            rig.group.look()
        assert "healthy" not in rig.states()
        assert [r.broken for r in rig.ranks[:2]] == [[port], [port]]
        await until(lambda: rig.states() == {"dead"})
        assert not still.up
        assert rig.group.board.ranks[2].fault_info == "EngineSilent"
        assert (await rig.ordered("respawn", rank=0)).results[0].success
        assert rig.ranks[2] is not still and rig.states() == {"healthy"}


async def test_one_that_cannot_join_keeps_all_out() -> None:
    async with running() as rig:
        rig.fail(0)
        rig.ranks[1].refuses = True
        order = await rig.ordered("respawn", rank=0)
        assert order.results[0].reason == "rank 1: no device"
        assert ("state", 2, "healthy") not in rig.tally.events[3:]  # not even for a moment
        await until(lambda: rig.states() == {"dead"})
        assert rig.ranks[2].broken[-1] == rig.front.port  # the new one, too
        rig.ranks[1].refuses = False
        assert (await rig.ordered("respawn", rank=0)).results[0].success


async def test_one_that_fails_again_before_the_others_are_back() -> None:
    async with running() as rig:
        rig.fail(0)
        late = rig.ranks[2]
        gate = asyncio.Event()
        join = late.order

        async def slowly(request: FaultToleranceRequest) -> FaultToleranceResult:
            await gate.wait()
            return await join(request)

        late.order = slowly  # type: ignore[method-assign]
        order = rig.orders.apply({"instruction": "respawn", "params": {"rank": 0}})
        await until(lambda: rig.ranks[0].joined)
        rig.fail(0)
        assert late.broken[-1] == rig.front.port
        gate.set()
        await until(lambda: order.payload()["status"] == "done")
        assert order.results[0].reason == "a rank failed again while the group was formed"
        assert "healthy" not in rig.states()


async def test_automatic_recovery_ends_when_it_does_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coupled, "_DELAYS", (0.0, 0.0))
    auto = {"fault_tolerance_config": {"auto_recover": "respawn"}}
    async with running(**auto) as rig:
        for round_ in range(1, 4):
            rig.fail(round_ % 3)
            await until(lambda: rig.states() == {"healthy"})
        rig.fail(0)  # the fourth in a row without a token
        await asyncio.sleep(0.1)
        assert rig.states() == {"dead"}
        assert (await rig.ordered("respawn", rank=0)).results[0].success
        rig.ranks[0].say(EngineOutput("x", [1]))  # progress
        await asyncio.sleep(0.05)
        rig.ranks[1].refuses = True
        joined = len(rig.ranks[1].joined)
        rig.fail(0)
        await until(lambda: len(rig.ranks[1].joined) == joined + 2)
        await asyncio.sleep(0.05)
        assert rig.group.board.ranks[0].error == "rank 1: no device"
        assert rig.states() == {"dead"}


async def test_sequences_wait_for_the_new_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupled, "_DELAYS", (0.0,))
    auto = {
        "fault_tolerance_config": {"auto_recover": "respawn"},
        "retry_aborted_requests": True,
    }
    async with running(**auto) as rig:
        placer = rig.group.placer
        one, two, three = (placer.add([request(name)])[0] for name in "abc")
        assert {one, two, three} == {0, 1, 2}
        rig.ranks[one].say(EngineOutput("a", [7, 8]))
        await asyncio.sleep(0.05)
        gate = asyncio.Event()
        join = rig.ranks[two].order

        async def slowly(request: FaultToleranceRequest) -> FaultToleranceResult:
            await gate.wait()
            return await join(request)

        rig.ranks[two].order = slowly  # type: ignore[method-assign]
        rig.fail(one)
        for rank, name in ((one, "a"), (two, "b"), (three, "c")):
            rig.ranks[rank].say(EngineOutput(name, [], finish_reason="abort"))
        await asyncio.sleep(0.05)
        assert not rig.ends
        placer.abort(["c"])  # its client is gone
        gate.set()
        await until(lambda: rig.states() == {"healthy"})
        again = {r.request_id: r for client in rig.ranks for r in client.added[1:]}
        assert set(again) == {"a", "b"}
        assert again["a"].prompt_token_ids == [1, 2, 3, 7, 8]
        assert not rig.ends and len(placer._routes) == 2
        loads = placer.balancer.loads.values()
        assert sum(load.own for load in loads) == 2

        # The next group cannot be formed: they end.
        for client in rig.ranks:
            client.refuses = True
        owner = {name: c.rank for c in rig.ranks for r in c.added[1:] for name in [r.request_id]}
        rig.fail(0)
        for name in "ab":
            rig.ranks[owner[name]].say(EngineOutput(name, [], finish_reason="abort"))
        await until(lambda: len(rig.ends) == 2)
        assert {(o.request_id, o.finish_reason) for o in rig.ends} == {
            ("a", "abort"), ("b", "abort")
        }  # fmt: skip
        assert not placer._routes and all(load.own == 0 for load in loads)


async def test_a_start_that_fails_during_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupled, "_DELAYS", (0.0, 0.0))
    started: list[int] = []

    async def broken(self: CoupledClient) -> EngineReady:
        started.append(self.rank)
        self.up = False
        raise EngineStartError("no device was found")

    auto = {"fault_tolerance_config": {"auto_recover": "respawn"}}
    async with running(**auto) as rig:
        monkeypatch.setattr(CoupledClient, "start", broken)
        rig.ranks[1].die()
        await until(lambda: len(started) == 2)
        await asyncio.sleep(0.05)
        assert started == [1, 1] and rig.states() == {"dead"}  # two tries, and no more
        order = await rig.ordered("respawn", rank=1)
        assert order.results[1].reason == "rank 1: no device was found"
        assert len(started) == 3 and rig.states() == {"dead"}


def test_settings_that_clash_end_the_start() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size does not work with ranks"):
        Rig(pipeline_parallel_size=2)
