"""Waves of ranks that share experts: they step together or not at all. Pure data.

A wave is the time between two moments at which every rank is idle. In a wave all ranks run the
same number of steps, with dummy batches where they have nothing; every `interval` steps they vote
(`sync`) whether anyone still has work. The coordinator wakes the ranks for a new wave; what it
hears may be old, so a rank that finds itself asleep with a request of an older wave says so.

Messages: the front sends FIRST_REQ(rank, wave) to the coordinator with the first request of what
it takes for an idle group (`first_request`); the coordinator broadcasts `StartWave`; rank 0 reports
that a wave runs (`wave_started`) and has ended (`wave_complete`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

SYNC_INTERVAL = 16  # steps between two votes


@dataclass(frozen=True)
class StartWave:
    """START_DP_WAVE, for every rank but `exclude` (which has the request and runs anyway)."""

    wave: int
    exclude: int | None = None


@dataclass(frozen=True)
class Coordinator:
    """What the coordinator knows. `running` follows the ranks' notices alone: a front's could
    meet a wave that is just ending."""

    wave: int = 0
    running: bool = False


def first_request(state: Coordinator, rank: int, wave: int) -> StartWave | None:
    """A front sent a request of `wave` to `rank`, and takes the group for idle."""
    if state.running:
        return None
    # with an old wave the request itself will not wake its rank
    return StartWave(state.wave, rank if wave == state.wave else None)


def wave_started(
    state: Coordinator, wave: int, rank: int | None = None
) -> tuple[Coordinator, StartWave | None]:
    """Rank 0 runs `wave` (`rank` None), or `rank` found a request in its sleep and needs the
    others."""
    if wave < state.wave:
        return state, None
    news = replace(state, wave=wave, running=True)
    if rank is None or (state.running and state.wave == wave):
        return news, None
    return news, StartWave(wave, rank)


def wave_complete(state: Coordinator, wave: int) -> Coordinator:
    """Rank 0 reports that `wave` has ended. Late news of an older wave changes nothing."""
    return state if wave < state.wave else Coordinator(wave + 1, False)


@dataclass(frozen=True)
class RankWave:
    """One rank. `pausing`: it was asked to pause, which takes effect when all were; `resuming`:
    it was asked to go on, which takes effect when all are paused and were asked."""

    rank: int
    wave: int = 0
    running: bool = False
    step: int = 0
    pausing: bool = False
    paused: bool = False
    resuming: bool = False


def on_request(state: RankWave, wave: int) -> tuple[RankWave, int | None]:
    """A request stamped with `wave` arrives and wakes the rank (for good: the others will wait
    for it, even if the request is aborted). Returns the wave to report to the coordinator when
    the stamp is old and the rank was asleep: nobody else may know that there is work."""
    asleep = not state.running and not state.paused
    awake = replace(state, wave=max(wave, state.wave), running=True)
    return awake, state.wave if wave < state.wave and asleep else None


def on_start(state: RankWave, start: StartWave) -> RankWave:
    """START_DP_WAVE arrives. Ignored by the excluded rank, by one that pauses (it takes part in
    the votes anyway) or is paused, and when the wave is over already."""
    ignored = state.pausing or state.paused or start.exclude == state.rank
    if ignored or start.wave < state.wave:
        return state
    return replace(state, wave=start.wave, running=True)


def takes_part(state: RankWave, has_work: bool) -> bool:
    """Whether the rank joins the next step (a dummy batch if it has no work)."""
    return not state.paused and (state.running or has_work or state.pausing)


def votes(state: RankWave, interval: int = SYNC_INTERVAL) -> bool:
    """Whether the step just made is followed by a vote: the first, then every `interval`-th."""
    return (state.step - 1) % interval == 0


def stepped(state: RankWave) -> RankWave:
    """A step was made, with or without work of its own."""
    return replace(state, step=state.step + 1, running=True)


def sync(
    ranks: Sequence[RankWave], work: Sequence[bool]
) -> tuple[tuple[RankWave, ...], int | None]:
    """The vote: what each rank has after it, and the wave that rank 0 reports as complete.

    Every rank computes the same from the reduced values: the highest wave, any work anywhere,
    whether all want to pause.
    """
    pause = all(r.pausing for r in ranks)
    after, ended = _settle(ranks, any(work))
    if pause:
        after = tuple(replace(r, pausing=False, paused=True, step=0) for r in after)
    return after, ended


def _settle(ranks: Sequence[RankWave], busy: bool) -> tuple[tuple[RankWave, ...], int | None]:
    wave = max(r.wave for r in ranks)
    if busy:
        return tuple(replace(r, wave=wave, running=True) for r in ranks), None
    return tuple(replace(r, wave=wave + 1, running=False, step=0) for r in ranks), wave


def request_pause(state: RankWave) -> RankWave:
    """First phase; `sync` does the second. Nothing for a paused rank."""
    return state if state.paused else replace(state, pausing=True)


def request_resume(state: RankWave) -> RankWave:
    """Takes effect at the barrier (`resume`), after the pause did: a pause that was cancelled
    half-way would have lost the starts ignored meanwhile."""
    return replace(state, resuming=state.pausing or state.paused)


def resume(
    ranks: Sequence[RankWave], work: Sequence[bool]
) -> tuple[tuple[RankWave, ...], int | None]:
    """The barrier of a resume, when every rank is `resuming`: all run on together, or none does
    and the wave is over (what it had was aborted meanwhile)."""
    after, ended = _settle(ranks, any(work))
    return tuple(replace(r, paused=False, resuming=False) for r in after), ended
