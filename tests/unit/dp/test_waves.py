"""Every interleaving of a small group: no request is forgotten, no rank steps alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jaxengine.engine.dp import waves
from jaxengine.engine.dp.waves import Coordinator, RankWave, StartWave

N = 2
Queue = tuple[Any, ...]


@dataclass(frozen=True)
class World:
    """The whole system; queues are in order of sending, each with one sender and one receiver."""

    coordinator: Coordinator = Coordinator()
    ranks: tuple[RankWave, ...] = tuple(RankWave(i) for i in range(N))
    work: tuple[int, ...] = (0,) * N  # steps that each rank's requests still need
    belief: tuple[int, bool] = (0, False)  # the front's (wave, running)
    to_front: Queue = ()
    first_reqs: Queue = ()
    notices: tuple[Queue, ...] = ((),) * N  # rank -> coordinator
    starts: tuple[Queue, ...] = ((),) * N  # coordinator -> rank
    orders: tuple[Queue, ...] = ((),) * N  # front -> rank
    requests: int = 0  # that may still come
    pauses: int = 0
    paused: bool = False
    aborts: int = 0


def _at(items: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*items[:i], value, *items[i + 1 :])


def _push(queues: tuple[Queue, ...], i: int, item: Any) -> tuple[Queue, ...]:
    return _at(queues, i, (*queues[i], item))


def _broadcast(world: World, start: StartWave | None) -> World:
    if start is None:
        return world
    return replace(world, starts=tuple((*q, start) for q in world.starts))


def _coordinated(world: World, after: Coordinator, start: StartWave | None) -> World:
    news = (*world.to_front, (after.wave, after.running))
    return _broadcast(replace(world, coordinator=after, to_front=news), start)


def _front_moves(world: World) -> Iterator[World]:
    wave, running = world.belief
    if world.requests:
        for i in range(N):
            sent = replace(
                world,
                requests=world.requests - 1,
                orders=_push(world.orders, i, ("add", wave)),
                belief=(wave, True),
            )
            if not running:
                sent = replace(sent, first_reqs=(*sent.first_reqs, (i, wave)))
            yield sent
    if world.pauses and not world.paused:
        orders = tuple((*q, ("pause",)) for q in world.orders)
        yield replace(world, orders=orders, paused=True, pauses=world.pauses - 1)
    if world.paused:
        orders = tuple((*q, ("resume",)) for q in world.orders)
        yield replace(world, orders=orders, paused=False)
    if world.to_front:
        yield replace(world, belief=world.to_front[0], to_front=world.to_front[1:])


def _coordinator_moves(world: World) -> Iterator[World]:
    state = world.coordinator
    if world.first_reqs:
        rank, wave = world.first_reqs[0]
        left = replace(world, first_reqs=world.first_reqs[1:])
        yield _broadcast(left, waves.first_request(state, rank, wave))
    for i in range(N):
        if world.notices[i]:
            kind, wave = world.notices[i][0]
            left = replace(world, notices=_at(world.notices, i, world.notices[i][1:]))
            if kind == "complete":
                yield _coordinated(left, waves.wave_complete(state, wave), None)
            else:
                who = i if kind == "woken" else None
                yield _coordinated(left, *waves.wave_started(state, wave, who))


def _rank_moves(world: World) -> Iterator[World]:
    for i, rank in enumerate(world.ranks):
        if world.starts[i]:
            left = replace(world, starts=_at(world.starts, i, world.starts[i][1:]))
            after = waves.on_start(rank, world.starts[i][0])
            yield replace(left, ranks=_at(world.ranks, i, after))
        if world.aborts and world.work[i]:
            yield replace(world, work=_at(world.work, i, 0), aborts=world.aborts - 1)
        if not world.orders[i]:
            continue
        order = world.orders[i][0]
        left = replace(world, orders=_at(world.orders, i, world.orders[i][1:]))
        if order[0] == "add":
            after, woken = waves.on_request(rank, order[1])
            left = replace(left, work=_at(left.work, i, left.work[i] + 1))
            if woken is not None:
                left = replace(left, notices=_push(left.notices, i, ("woken", woken)))
        elif order[0] == "pause":
            after = waves.request_pause(rank)
        else:
            after = waves.request_resume(rank)
        yield replace(left, ranks=_at(world.ranks, i, after))


def _step(world: World, interval: int) -> Iterator[World]:
    """All ranks step together: the only way that anyone steps."""
    ranks = world.ranks
    if all(waves.takes_part(r, w > 0) for r, w in zip(ranks, world.work, strict=True)):
        if ranks[0].step == 0:
            world = replace(
                world, notices=_push(world.notices, 0, ("started", max(r.wave for r in ranks)))
            )
        ranks = tuple(waves.stepped(r) for r in ranks)
        work = tuple(max(0, w - 1) for w in world.work)
        assert len({r.step for r in ranks}) == 1
        ended = None
        if waves.votes(ranks[0], interval):
            ranks, ended = waves.sync(ranks, [w > 0 for w in work])
        world = replace(world, ranks=ranks, work=work)
        yield _report(world, ended)
    elif all(r.paused and r.resuming for r in ranks):
        after, ended = waves.resume(ranks, [w > 0 for w in world.work])
        yield _report(replace(world, ranks=after), ended)


def _report(world: World, ended: int | None) -> World:
    if ended is None:
        return world
    return replace(world, notices=_push(world.notices, 0, ("complete", ended)))


def _moves(world: World, interval: int) -> list[World]:
    return [
        *_front_moves(world),
        *_coordinator_moves(world),
        *_rank_moves(world),
        *_step(world, interval),
    ]


@pytest.mark.parametrize(
    "start,interval",
    [
        (World(requests=2), 1),
        pytest.param(World(requests=3), 1, marks=pytest.mark.slow),
        (World(requests=2), 2),
        (World(requests=2, aborts=1), 1),
        (World(requests=1, pauses=1), 1),
        pytest.param(World(requests=1, pauses=1, aborts=1), 2, marks=pytest.mark.slow),
    ],
    ids=["requests", "more-requests", "sparse-votes", "abort", "pause", "pause-abort"],
)
def test_every_interleaving_ends_idle(start: World, interval: int) -> None:
    """Where nothing can move any more: no work is left, all ranks sleep in the same wave, and
    coordinator and front know it. A lost wake-up would end with work and no move."""
    seen = {start}
    todo = [start]
    ends = 0
    while todo:
        world = todo.pop()
        after = _moves(world, interval)
        if not after:
            ends += 1
            assert world.work == (0,) * N, world
            assert not any(r.running or r.paused or r.pausing for r in world.ranks), world
            assert {r.wave for r in world.ranks} == {world.coordinator.wave}, world
            assert not world.coordinator.running, world
            assert world.belief == (world.coordinator.wave, False), world
        for news in after:
            if news not in seen:
                seen.add(news)
                todo.append(news)
        assert len(seen) < 400_000
    assert ends > 0


def test_votes_are_rare() -> None:
    state = RankWave(0)
    voted = []
    for _ in range(40):
        state = waves.stepped(state)
        voted.append(waves.votes(state))
    assert [i for i, v in enumerate(voted) if v] == [0, 16, 32]


def test_start_is_ignored_while_pausing() -> None:
    rank = waves.request_pause(RankWave(1))
    assert waves.on_start(rank, StartWave(0)) == rank
    assert waves.on_start(RankWave(1), StartWave(0, exclude=1)) == RankWave(1)
    assert waves.on_start(RankWave(1, wave=3), StartWave(2)).running is False
