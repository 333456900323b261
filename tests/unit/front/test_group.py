"""Several engines behind one front: placement, faults, replays, orders; without processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes import Fleet, Tally, add_one, request

from jaxengine.config import EngineConfig
from jaxengine.front.admission import UnavailableError
from jaxengine.front.client import EngineDeadError, EngineStartError
from jaxengine.front.ranks.balancer import Placement
from jaxengine.front.ranks.group import EngineGroup
from jaxengine.front.ranks.orders import Orders
from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.validation import RequestError
from jaxengine.wire.messages import (
    UNAVAILABLE,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    FaultToleranceRequest,
    RankStatus,
    TokenLogprobs,
    siblings_of,
)


@dataclass
class Rig:
    group: EngineGroup
    fleet: Fleet
    tally: Tally
    got: list[EngineOutput] = field(default_factory=list)
    running: asyncio.Task[None] | None = None

    async def take(self, rank: int, message: EngineOutputs) -> None:
        self.got += message.outputs

    def tokens(self, name: str) -> list[int]:
        return [t for o in self.got if o.request_id == name for t in o.new_token_ids]

    def end(self, name: str) -> str | None:
        ends = [o.finish_reason for o in self.got if o.request_id == name and o.finish_reason]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def sent(self, name: str) -> list[tuple[int, EngineRequest]]:
        clients = self.fleet.clients.values()
        return [(c.rank, r) for c in clients for r in c.added if r.request_id == name]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def rig(ranks: int = 2, **settings: Any) -> AsyncIterator[Rig]:
    fleet, tally = Fleet(), Tally()
    settings = {"enable_fault_tolerance": True, "data_parallel_size": ranks} | settings
    group = EngineGroup(EngineConfig.of(**settings), tally, make_client=fleet.make)
    fleet.status = group._on_status
    for client in fleet.clients.values():
        client._on_status = group._on_status
    made = Rig(group, fleet, tally)
    ready = await group.start()
    assert ready.num_blocks == 10 * ranks and group.board.healthy() == list(range(ranks))
    made.running = asyncio.create_task(group.run(made.take))
    await settle()
    try:
        yield made
    finally:
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)


async def test_only_healthy_ranks_get_requests() -> None:
    async with rig(3) as r:
        add = functools.partial(add_one, r.group.placer)
        assert {add(request(f"a{i}")) for i in range(6)} == {0, 1, 2}
        r.group._on_status(RankStatus(1, "unhealthy", fault_info="OomError"))
        assert {add(request(f"b{i}")) for i in range(6)} == {0, 2}
        r.fleet.clients[2].die()
        await settle()
        assert {add(request(f"c{i}")) for i in range(6)} == {0}
        assert add(request("fixed"), Placement(0)) == 0
        with pytest.raises(UnavailableError, match="rank 1 takes no requests: it is unhealthy"):
            add(request("x"), Placement(1))
        with pytest.raises(RequestError, match="rank 7 is not served here"):
            add(request("x"), Placement(7))
        r.group._on_status(RankStatus(0, "draining"))
        with pytest.raises(UnavailableError, match="rank 2 is dead"):
            add(request("x"))
        assert ("fault", 1, "OomError") in r.tally.events
        assert ("fault", 2, "ProcessDied") in r.tally.events


async def test_aborts_go_to_the_owner() -> None:
    async with rig(2) as r:
        owners = {f"a{i}": add_one(r.group.placer, request(f"a{i}")) for i in range(4)}
        r.group.placer.abort(["a1", "a2", "unknown"])
        for name in ("a1", "a2"):
            assert name in r.fleet.clients[owners[name]].aborted
            assert name not in r.fleet.clients[1 - owners[name]].aborted
        assert sum(load.own for load in r.group.placer.balancer.loads.values()) == 2
        r.fleet.clients[owners["a1"]].say(EngineOutput("a1", [5]))  # it crossed the abort
        await settle()
        assert r.tokens("a1") == []


async def test_a_dead_ranks_requests_end_and_others_go_on() -> None:
    async with rig(2) as r:
        for i in range(4):
            add_one(r.group.placer, request(f"a{i}"), Placement(i % 2))
        r.fleet.clients[1].say(EngineOutput("a1", [7]))
        r.fleet.clients[1].die()
        await settle()
        assert [r.end(f"a{i}") for i in range(4)] == [None, "abort", None, "abort"]
        assert r.tokens("a1") == [7]
        r.fleet.clients[0].say(EngineOutput("a0", [1], finish_reason="stop"))
        await settle()
        assert r.end("a0") == "stop"
        assert r.tally.events.count(("aborted", 1)) == 2
        loads = r.group.placer.balancer.loads
        assert (loads[0].own, loads[1].own) == (1, 0)


async def test_a_replay_has_no_gap() -> None:
    async with rig(2, retry_aborted_requests=True) as r:
        add = functools.partial(add_one, r.group.placer)
        greedy = request("g", [1, 2, 3], max_tokens=8, min_tokens=5, logprobs=0, prompt_logprobs=0)
        home = add(greedy)
        other = 1 - home
        row = TokenLogprobs([9], [-1.0], 1)
        r.fleet.clients[home].say(
            EngineOutput("g", [9, 8], logprobs=[row, row], prompt_logprobs=[None, row, row])
        )
        await settle()
        r.group._on_status(RankStatus(home, "unhealthy"))
        r.fleet.clients[home].say(EngineOutput("g", [], finish_reason="abort"))
        await settle()
        (again,) = [s for rank, s in r.sent("g") if rank == other]
        assert again.prompt_token_ids == [1, 2, 3, 9, 8]
        assert (again.params.max_tokens, again.params.min_tokens) == (6, 3)
        assert again.params.prompt_logprobs is None and again.params.logprobs == 0
        r.fleet.clients[home].say(EngineOutput("g", [666]))  # too late: it is not there any more
        r.fleet.clients[other].say(EngineOutput("g", [7], finish_reason="length"))
        await settle()
        assert r.tokens("g") == [9, 8, 7] and r.end("g") == "length"
        assert r.tally.events.count(("replayed", home)) == 1
        assert all(load.own == 0 for load in r.group.placer.balancer.loads.values())


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
    ],
    ids=str,
)
async def test_a_replay_from_the_start_drops_what_was_given_out(params: dict[str, Any]) -> None:
    async with rig(2, retry_aborted_requests=True) as r:
        home = add_one(r.group.placer, request("g", seed=3, temperature=1.0, **params))
        r.fleet.clients[home].say(EngineOutput("g", [9, 8]))
        await settle()
        r.fleet.clients[home].die()
        await settle()
        (again,) = [s for rank, s in r.sent("g") if rank != home]
        assert again.prompt_token_ids == [1, 2, 3] and again.params.max_tokens == 8
        row = TokenLogprobs([0], [0.0], 1)
        other = r.fleet.clients[1 - home]
        other.say(EngineOutput("g", [9], logprobs=[row]))
        other.say(EngineOutput("g", [8, 7], logprobs=[row, row]), EngineOutput("g", [6]))
        await settle()
        assert r.tokens("g") == [9, 8, 7, 6]
        assert [len(o.logprobs) for o in r.got if o.logprobs is not None] == [1]


async def test_what_is_not_replayed() -> None:
    """Unseeded once it has begun, pinned ones, what the front itself had aborted, and anything
    when no other rank is healthy."""
    async with rig(2, retry_aborted_requests=True) as r:
        add = functools.partial(add_one, r.group.placer)
        add(request("random", temperature=1.0), Placement())
        home = r.sent("random")[0][0]
        add(request("pinned"), Placement(home))
        add(request("asked"))
        add(request("unstarted", temperature=1.0))
        r.fleet.clients[home].say(EngineOutput("random", [4]))
        await settle()
        ends = [EngineOutput(n, [], finish_reason="abort") for n in ("random", "pinned")]
        r.fleet.clients[home].say(*ends)
        await settle()
        assert r.end("random") == "abort" and r.end("pinned") == "abort"
        (unstarted,) = r.sent("unstarted")
        r.fleet.clients[unstarted[0]].say(EngineOutput("unstarted", [], finish_reason="abort"))
        await settle()
        assert r.end("unstarted") is None and len(r.sent("unstarted")) == 2
        await r.group.call("pause", "abort")
        (asked,) = r.sent("asked")
        r.fleet.clients[asked[0]].say(EngineOutput("asked", [], finish_reason="abort"))
        await settle()
        assert r.end("asked") == "abort"
        last = add(request("last"))
        r.fleet.clients[1 - last].die()
        await settle()
        r.fleet.clients[last].die()
        await settle()
        assert r.end("last") == "abort"


async def test_a_request_that_crossed_the_fault_goes_elsewhere() -> None:
    async with rig(2) as r:
        home = add_one(r.group.placer, request("a", temperature=1.0))
        refusal = EngineOutput("a", [], finish_reason="error", stop_reason=UNAVAILABLE, error="x")
        r.fleet.clients[home].say(refusal)
        await settle()
        assert r.end("a") is None and [rank for rank, _ in r.sent("a")] == [0, 1]
        r.group._on_status(RankStatus(home, "unhealthy"))
        r.fleet.clients[1 - home].say(refusal)
        await settle()
        assert r.end("a") == "error" and r.got[-1].stop_reason == UNAVAILABLE


async def test_a_replay_that_crossed_another_fault_goes_on() -> None:
    """Two ranks fail at once: what the first had comes to the second as it fails."""
    async with rig(3, retry_aborted_requests=True) as r:
        home = add_one(r.group.placer, request("a", max_tokens=9))
        r.fleet.clients[home].say(EngineOutput("a", [5, 6]))
        await settle()
        r.fleet.clients[home].die()
        await settle()
        (second,) = {rank for rank, _ in r.sent("a")} - {home}
        refusal = EngineOutput("a", [], finish_reason="error", stop_reason=UNAVAILABLE, error="x")
        r.fleet.clients[second].say(refusal)
        await settle()
        (third,) = {rank for rank, _ in r.sent("a")} - {home, second}
        assert r.end("a") is None
        r.group._on_status(RankStatus(second, "unhealthy"))
        r.fleet.clients[third].say(refusal)  # and nobody is left
        await settle()
        assert r.end("a") == "abort" and r.tokens("a") == [5, 6]


async def test_without_fault_tolerance_one_death_ends_all() -> None:
    async with rig(2, enable_fault_tolerance=False) as r:
        assert r.running is not None
        r.fleet.clients[1].die()
        with pytest.raises(EngineDeadError, match="data-parallel rank 1: .*ends with it"):
            await asyncio.wait_for(r.running, 1)


async def test_calls_go_to_all_and_fail_with_one() -> None:
    async with rig(3) as r:
        assert await r.group.call("reset_prefix_cache") is True
        r.fleet.clients[1].answers["reset_prefix_cache"] = False
        assert await r.group.call("reset_prefix_cache") is False
        r.fleet.clients[1].answers["reset_prefix_cache"] = RuntimeError("no")
        with pytest.raises(RuntimeError, match="no"):
            await r.group.call("reset_prefix_cache")
        r.group._on_status(RankStatus(1, "unhealthy"))
        assert await r.group.call("reset_prefix_cache") is True
        for rank in (0, 2):
            r.group._on_status(RankStatus(rank, "dead"))
        with pytest.raises(UnavailableError, match="rank 0 is dead"):
            await r.group.call("reset_prefix_cache")


async def test_orders() -> None:
    async with rig(2) as r:
        orders = Orders(r.group.board, r.group.order)
        for body, named in [
            ([], "JSON object"),
            ({}, "instruction is missing"),
            ({"instruction": "explode"}, "unknown instruction"),
            ({"instruction": ["retry"]}, "unknown instruction"),
            ({"instruction": "retry", "params": 3}, "params must be an object"),
            ({"instruction": "retry", "params": {"rank": 2}}, "params.rank 2"),
            ({"instruction": "retry", "params": {"rank": True}}, "params.rank True"),
        ]:
            with pytest.raises(RequestError, match=named):
                orders.apply(body)
        r.group._on_status(RankStatus(1, "unhealthy", fault_info="OomError"))
        entry = r.group.board.payload()["engines"][1]
        assert entry["status"] == "unhealthy" and entry["fault_info"] == "OomError"
        order = orders.apply({"instruction": "retry"})
        assert order.ranks == [1] and order.payload()["status"] == "pending"
        await settle()
        found = orders.find(order.request_id)
        assert found is not None and found.payload()["success"] is True
        entry = r.group.board.payload()["engines"][1]
        assert entry["status"] == "healthy" and "fault_info" not in entry
        assert entry["last_ft_request_id"] == order.request_id
        assert ("recovery", 1, True) in r.tally.events

        r.fleet.clients[0].die()
        await settle()
        retry = orders.apply({"instruction": "retry", "params": {"rank": 0}})
        await settle()
        assert retry.payload()["success"] is False
        assert "respawn" in retry.payload()["results"][0]["reason"]
        assert "respawn" in r.group.board.payload()["engines"][0]["ft_error"]
        first, second = (orders.apply({"instruction": "respawn"}) for _ in range(2))
        await settle()
        assert first.payload()["success"] is True and second.payload()["success"] is False
        assert "starting" in second.payload()["results"][0]["reason"]
        assert r.group.board.healthy() == [0, 1] and r.group.board.ranks[0].epoch == 1
        add_one(r.group.placer, request("new"), Placement(0))
        r.fleet.clients[0].say(EngineOutput("new", [3], finish_reason="stop"))
        await settle()
        assert r.end("new") == "stop"
        assert r.group.board.payload()["history"]


async def test_a_respawn_that_fails_leaves_the_rank_dead() -> None:
    async with rig(2) as r:
        r.fleet.clients[1].die()
        await settle()
        r.fleet.broken = True
        result = await r.group.order(1, FaultToleranceRequest("x", "respawn"))
        assert not result.success and "no device" in result.reason
        assert r.group.board.ranks[1].state == "dead"
        assert ("recovery", 1, False) in r.tally.events
        r.fleet.broken = False
        assert (await r.group.order(1, FaultToleranceRequest("y", "respawn"))).success
        assert r.group.board.ranks[1].epoch == 2


async def test_auto_respawn_of_a_process() -> None:
    async with rig(2, fault_tolerance_config={"auto_recover": "respawn"}) as r:
        before = r.fleet.clients[1]
        await r.group.call("pause", "keep")
        before.die()
        await settle()
        assert r.fleet.clients[1] is not before and r.group.board.healthy() == [0, 1]


def look(r: Rig, times: int) -> None:
    for _ in range(times):
        r.group.look()


async def test_a_silent_rank_is_routed_round_and_killed() -> None:
    """M7: a process that stands still, with work and without."""
    limits = {"step_timeout_sec": 5}
    async with rig(2, fault_tolerance_config=limits) as r:
        for i in range(4):
            add_one(r.group.placer, request(f"a{i}"), Placement(i % 2))
        r.fleet.clients[1].say(EngineOutput("a1", [7]))
        await settle()
        r.fleet.clients[1].quiet = True
        look(r, 5)  # a question and four seconds
        await settle()
        assert r.group.board.healthy() == [0, 1] and r.fleet.clients[1].pings == 1
        look(r, 1)
        assert r.group.board.healthy() == [0]  # at once: no request may go there
        assert {add_one(r.group.placer, request(f"b{i}")) for i in range(4)} == {0}
        await settle()
        assert [r.end(f"a{i}") for i in range(4)] == [None, "abort", None, "abort"]
        assert not r.fleet.clients[1].up and r.fleet.clients[0].up
        events = [e for e in r.group.board.payload()["history"] if e["id"] == 1]
        assert [(e["status"], e.get("fault_info")) for e in events[-2:]] == [
            ("unhealthy", "EngineSilent"),
            ("dead", "EngineSilent"),
        ]
        assert r.tally.events.count(("fault", 1, "EngineSilent")) == 1
        result = await r.group.order(1, FaultToleranceRequest("x", "respawn"))
        assert result.success and r.group.board.healthy() == [0, 1]

        await settle()
        look(r, 20)  # the new one answers
        await settle()
        assert r.group.board.healthy() == [0, 1] and r.fleet.clients[1].pings == 20
        r.fleet.clients[0].quiet = True
        look(r, 6)
        r.fleet.clients[1].quiet = True
        await settle()
        pings = r.fleet.clients[0].pings
        look(r, 6)
        await settle()
        assert r.fleet.clients[0].pings == pings  # who is given up is asked no more
        assert r.group.board.healthy() == []
        assert r.end("b0") == "abort"


async def test_any_word_is_a_sign_of_life() -> None:
    async with rig(2, fault_tolerance_config={"step_timeout_sec": 3}) as r:
        client = r.fleet.clients[1]
        client.quiet = True
        for _ in range(5):
            look(r, 3)
            client.say(EngineOutput("unknown", [1]))
            await settle()
        look(r, 3)
        client.quiet = False  # it goes on, and answers what it was asked
        client._silence.heard()
        look(r, 3)
        await settle()
        assert r.group.board.healthy() == [0, 1] and client.up


async def test_a_silent_ranks_requests_go_on_elsewhere() -> None:
    settings = {"step_timeout_sec": 3, "auto_recover": "respawn"}
    async with rig(2, retry_aborted_requests=True, fault_tolerance_config=settings) as r:
        home = add_one(r.group.placer, request("g"))
        before = r.fleet.clients[home]
        before.say(EngineOutput("g", [9, 8]))
        await settle()
        before.quiet = True
        look(r, 4)
        await settle()
        (again,) = [s for rank, s in r.sent("g") if rank != home]
        assert again.prompt_token_ids == [1, 2, 3, 9, 8]
        r.fleet.clients[1 - home].say(EngineOutput("g", [7], finish_reason="length"))
        await settle()
        assert r.tokens("g") == [9, 8, 7] and r.end("g") == "length"
        assert r.fleet.clients[home] is not before and r.group.board.healthy() == [0, 1]


async def test_a_silent_rank_that_had_failed_already_is_replaced() -> None:
    """It waits for an order, and cannot hear one."""
    async with rig(2, fault_tolerance_config={"step_timeout_sec": 3}) as r:
        r.group._on_status(RankStatus(1, "dead", fault_info="WorkerDied"))
        r.fleet.clients[1].quiet = True
        look(r, 4)
        await settle()
        states = [e["status"] for e in r.group.board.payload()["history"] if e["id"] == 1]
        assert states == ["healthy", "dead"]
        assert (await r.group.order(1, FaultToleranceRequest("x", "respawn"))).success


async def test_a_process_that_is_gone_is_asked_nothing() -> None:
    """Its silence is not held against the one that came in its place."""
    settings = {"step_timeout_sec": 3, "auto_recover": "respawn"}
    async with rig(2, fault_tolerance_config=settings) as r:
        before = r.fleet.clients[1]
        before.die()
        await settle()
        assert r.fleet.clients[1] is not before and r.group.board.healthy() == [0, 1]
        look(r, 10)
        await settle()
        assert before.pings == 0 and r.group.board.healthy() == [0, 1]


async def test_without_fault_tolerance_silence_ends_all() -> None:
    async with rig(2, enable_fault_tolerance=False) as r:
        assert r.running is not None
        r.fleet.clients[1].quiet = True
        look(r, 300)
        await settle()
        assert not r.running.done()
        look(r, 1)
        with pytest.raises(EngineDeadError, match="rank 1: .*said nothing for 300 s"):
            await asyncio.wait_for(r.running, 1)
        assert not r.fleet.clients[1].up


async def test_a_rank_that_does_not_start_is_named() -> None:
    fleet = Fleet()
    config = EngineConfig.of(data_parallel_size=2)
    group = EngineGroup(config, Tally(), make_client=fleet.make)
    fleet.broken = True
    with pytest.raises(EngineStartError, match="data-parallel rank [01]: no device"):
        await group.start()
    assert not any(client.up for client in fleet.clients.values())


async def test_affinity() -> None:
    async with rig(4, data_parallel_affinity="session") as r:
        add = functools.partial(add_one, r.group.placer)
        ranks = {add(request(f"a{i}"), Placement(session="me")) for i in range(4)}
        assert len(ranks) == 1
        assert len({add(request(f"b{i}")) for i in range(8)}) > 1
    async with rig(4, data_parallel_affinity="prefix") as r:
        start = list(range(100))
        ranks = {add_one(r.group.placer, request(f"a{i}", [*start, i])) for i in range(4)}
        assert len(ranks) == 1


async def test_one_rank_of_many_behind_a_balancer_outside() -> None:
    fleet = Fleet()
    config = EngineConfig.of(
        data_parallel_size=4, data_parallel_rank=2, data_parallel_external_lb=True
    )
    group = EngineGroup(config, Tally(), make_client=fleet.make)
    await group.start()
    assert list(fleet.clients) == [2]
    assert add_one(group.placer, request("a")) == 2
    assert add_one(group.placer, request("b"), Placement(2)) == 2
    with pytest.raises(RequestError, match="rank 1 is not served here .rank 2 is"):
        add_one(group.placer, request("c"), Placement(1))


async def test_sequences_of_one_request_share_a_message() -> None:
    """H3: n copies of a prompt would be n times as long on the wire."""
    async with rig(2) as r:
        sent: list[list[str]] = []
        for client in r.fleet.clients.values():
            add = client.add

            def note(requests: list[EngineRequest], add: Any = add) -> None:
                sent.append([one.request_id for one in requests])
                add(requests)

            client.add = note  # type: ignore[method-assign]
        first = request("0_a", seed=7, prompt_logprobs=1, temperature=1.0)
        names = [(f"{i}_a", 7 + i) for i in range(1, 6)]
        ranks = r.group.placer.add([first, *siblings_of(first, names)])
        assert len(sent) == 2 and sorted(len(ids) for ids in sent) == [3, 3]
        where = {one.request_id: c.rank for c in r.fleet.clients.values() for one in c.added}
        assert [where[f"{i}_a"] for i in range(6)] == ranks
        r.group.placer.abort([f"{i}_a" for i in range(6)])
        assert sum(load.own for load in r.group.placer.balancer.loads.values()) == 0


async def test_sequences_go_elsewhere_when_a_rank_turns_out_to_be_gone() -> None:
    async with rig(2) as r:
        r.fleet.clients[1].up = False  # and nobody has noticed
        first = request("0_a")
        more = siblings_of(first, [(f"{i}_a", None) for i in range(1, 4)])
        assert r.group.placer.add([first, *more]) == [0, 0, 0, 0]
        r.fleet.clients[0].up = False
        with pytest.raises(UnavailableError, match="no engine can be reached"):
            r.group.placer.add([request("b")])
