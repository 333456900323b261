"""Waves of ranks that share experts: they step together or not at all. Pure data.

A wave is the time between two moments at which every rank is idle. In a wave all ranks run the
same steps, with dummy batches where they have nothing; with every step they vote (`sync`) whether
anyone still has work. A rank that finds work in its sleep wakes (`on_work`) and says so to the
coordinator, which has the others start (`StartWave`); rank 0 tells it when a wave has ended. What
the coordinator hears may be old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StartWave:
    """Wakes every rank but `exclude`, which has the work and runs anyway."""

    wave: int
    exclude: int


@dataclass(frozen=True)
class Coordinator:
    """What the coordinator knows, from the ranks' notices alone."""

    wave: int = 0
    running: bool = False


def wave_started(state: Coordinator, wave: int, rank: int) -> tuple[Coordinator, StartWave | None]:
    """`rank` found work in its sleep and needs the others."""
    if wave < state.wave:
        return state, None
    news = Coordinator(wave, True)
    return news, None if news == state else StartWave(wave, rank)


def wave_complete(state: Coordinator, wave: int) -> Coordinator:
    """Rank 0 reports that `wave` has ended. Late news of an older wave changes nothing."""
    return state if wave < state.wave else Coordinator(wave + 1, False)


@dataclass(frozen=True)
class RankWave:
    """One rank. While not `running` it sleeps, and `wave` is the one to come."""

    rank: int
    wave: int = 0
    running: bool = False


def on_work(state: RankWave) -> RankWave:
    """The rank found work: it wakes for good, since the others will wait for it, even if the
    request is aborted meanwhile."""
    return replace(state, running=True)


def on_start(state: RankWave, wave: int) -> RankWave:
    """The start of a wave arrives. One that is over already changes nothing."""
    return state if wave < state.wave else replace(state, wave=wave, running=True)


def sync(
    ranks: Sequence[RankWave], work: Sequence[bool]
) -> tuple[tuple[RankWave, ...], int | None]:
    """The vote: what each rank has after it, and the wave that rank 0 reports as complete.

    Every rank computes the same from the reduced values: the highest wave, any work anywhere.
    """
    wave = max(r.wave for r in ranks)
    if any(work):
        return tuple(replace(r, wave=wave, running=True) for r in ranks), None
    return tuple(replace(r, wave=wave + 1, running=False) for r in ranks), wave
