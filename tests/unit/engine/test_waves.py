"""Every interleaving of a small group: no request is forgotten, no rank steps alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jaxengine.engine.coupled import waves
from jaxengine.engine.coupled.waves import Coordinator, RankWave, StartWave

N = 2
Queue = tuple[Any, ...]


@dataclass(frozen=True)
class World:
    """The whole system; queues are in order of sending, each with one sender and one receiver."""

    coordinator: Coordinator = Coordinator()
    ranks: tuple[RankWave, ...] = tuple(RankWave(i) for i in range(N))
    work: tuple[int, ...] = (0,) * N  # steps that each rank's requests still need
    notices: tuple[Queue, ...] = ((),) * N  # rank -> coordinator
    starts: tuple[Queue, ...] = ((),) * N  # coordinator -> rank
    requests: int = 0  # that may still come
    aborts: int = 0


def _at(items: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*items[:i], value, *items[i + 1 :])


def _push(queues: tuple[Queue, ...], i: int, item: Any) -> tuple[Queue, ...]:
    return _at(queues, i, (*queues[i], item))


def _coordinator_moves(world: World) -> Iterator[World]:
    for i in range(N):
        if not world.notices[i]:
            continue
        kind, wave = world.notices[i][0]
        left = replace(world, notices=_at(world.notices, i, world.notices[i][1:]))
        if kind == "complete":
            yield replace(left, coordinator=waves.wave_complete(world.coordinator, wave))
            continue
        after, start = waves.wave_started(world.coordinator, wave, i)
        left = replace(left, coordinator=after)
        for other in range(N):
            if start is not None and other != start.exclude:
                left = replace(left, starts=_push(left.starts, other, start.wave))
        yield left


def _rank_moves(world: World) -> Iterator[World]:
    for i, rank in enumerate(world.ranks):
        if world.requests:
            work = _at(world.work, i, world.work[i] + 1)
            yield replace(world, work=work, requests=world.requests - 1)
        if world.aborts and world.work[i]:
            yield replace(world, work=_at(world.work, i, 0), aborts=world.aborts - 1)
        if world.starts[i]:
            left = replace(world, starts=_at(world.starts, i, world.starts[i][1:]))
            after = waves.on_start(rank, world.starts[i][0])
            yield replace(left, ranks=_at(world.ranks, i, after))
        if world.work[i] and not rank.running:
            yield replace(
                world,
                ranks=_at(world.ranks, i, waves.on_work(rank)),
                notices=_push(world.notices, i, ("woken", rank.wave)),
            )


def _step(world: World) -> Iterator[World]:
    """All ranks step together: the only way that anyone steps. Requests may come in between."""
    if not all(rank.running for rank in world.ranks):
        return
    work = tuple(max(0, w - 1) for w in world.work)
    ranks, ended = waves.sync(world.ranks, [w > 0 for w in work])
    assert len({(rank.wave, rank.running) for rank in ranks}) == 1
    world = replace(world, ranks=ranks, work=work)
    if ended is not None:
        world = replace(world, notices=_push(world.notices, 0, ("complete", ended)))
    yield world


@pytest.mark.parametrize(
    "start",
    [World(requests=1), World(requests=4), World(requests=3, aborts=2)],
    ids=["one-request", "requests", "aborts"],
)
def test_every_interleaving_ends_idle(start: World) -> None:
    """Where nothing can move any more: no work is left, all ranks sleep in the same wave, and the
    coordinator knows it. A lost wake-up would end with work and no move."""
    seen = {start}
    todo = [start]
    ends = 0
    while todo:
        world = todo.pop()
        after = [*_coordinator_moves(world), *_rank_moves(world), *_step(world)]
        if not after:
            ends += 1
            assert world.work == (0,) * N, world
            assert not any(rank.running for rank in world.ranks), world
            assert {rank.wave for rank in world.ranks} == {world.coordinator.wave}, world
            assert not world.coordinator.running, world
        for news in after:
            if news not in seen:
                seen.add(news)
                todo.append(news)
        assert len(seen) < 400_000
    assert ends > 0


def test_a_start_goes_out_once() -> None:
    state, start = waves.wave_started(Coordinator(), 0, 1)
    assert (state, start) == (Coordinator(0, True), StartWave(0, exclude=1))
    assert waves.wave_started(state, 0, 0) == (state, None)  # woken too, in the same wave
    assert waves.wave_started(Coordinator(3), 2, 0) == (Coordinator(3), None)
    late = waves.wave_complete(Coordinator(2, True), 1)
    assert late == Coordinator(2, True)


def test_an_old_start_wakes_nobody() -> None:
    rank = RankWave(1, wave=3)
    assert waves.on_start(rank, 2) == rank
    assert waves.on_start(rank, 3).running
