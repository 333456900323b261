"""The state machine of faults, in every interleaving, against a table written out by hand."""

from __future__ import annotations

import pytest

from jaxengine.engine.fault.state import (
    Event,
    Fault,
    Health,
    Order,
    Recovered,
    RecoveryFailed,
    State,
    Timeout,
    WorkerGone,
    advance,
)

H, U, D, G = State.HEALTHY, State.UNHEALTHY, State.DEAD, State.DRAINING
EVENTS: list[Event] = [
    Fault(True),
    Fault(False),
    WorkerGone(),
    Order("retry"),
    Order("respawn"),
    Order("drain"),
    Order("__class__"),
    Timeout(),
    Recovered(),
    RecoveryFailed(True),
    RecoveryFailed(False),
]
DEPTH = 6

# (state, being recovered by) and event -> where it leads; whatever is not here is refused.
Place = tuple[State | str, str | None]
TABLE: dict[tuple[Place, Event], Place] = {
    ((H, None), Fault(True)): (U, None),
    ((H, None), Fault(False)): (D, None),
    ((H, None), Order("drain")): (G, None),
    ((G, None), Fault(True)): (U, None),
    ((G, None), Fault(False)): (D, None),
    ((U, None), WorkerGone()): (D, None),
    ((U, None), Order("retry")): (U, "retry"),
    ((U, None), Order("respawn")): (U, "respawn"),
    ((U, None), Timeout()): ("ended", None),
    ((D, None), Order("respawn")): (D, "respawn"),
    ((D, None), Timeout()): ("ended", None),
    **{
        ((state, how), event): place
        for state in (U, D)
        for how in ("retry", "respawn")
        for event, place in [
            (Recovered(), ("home", None)),
            (RecoveryFailed(True), (U, None)),
            (RecoveryFailed(False), (D, None)),
        ]
    },
}


def test_every_interleaving_of_six_events() -> None:
    seen: set[Place] = set()
    level: set[tuple[Health, Place, State]] = {(Health(), (H, None), H)}
    for _ in range(DEPTH):
        following = set()
        for health, place, home in level:
            for event in EVENTS:
                new, reason = advance(health, event)
                expected = TABLE.get((place, event))
                if expected is None:
                    assert new == health and reason, (place, event)
                    following.add((new, place, home))
                    continue
                assert reason == "", (place, event, reason)
                home_now = G if event == Order("drain") else home
                there: Place = (home_now, None) if expected[0] == "home" else expected
                assert new.ended == (there[0] == "ended"), (place, event)
                if not new.ended:
                    assert (new.state, new.recovering) == there, (place, event)
                following.add((new, there, home_now))
                seen.add(there)
        level = following
    reachable = {(s, None) for s in (H, U, D, G, "ended")}
    reachable |= {(U, "retry"), (U, "respawn"), (D, "respawn")}
    assert seen == reachable


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([Order("retry")], "rejecting retry: the engine is healthy"),
        ([Fault(False), Order("retry")], "rejecting retry: the engine is dead"),
        ([Order("respawn")], "rejecting respawn: the engine is healthy"),
        ([Fault(True), Order("drain")], "rejecting drain: the engine is unhealthy"),
        (
            [Fault(True), Order("retry"), Order("respawn")],
            "rejecting respawn: a retry is in progress",
        ),
        ([Fault(True), Order("retry"), Timeout()], "a retry is in progress"),
        ([Fault(True), Timeout(), Order("retry")], "the engine is ending: no order came in time"),
        ([Order("boost")], "unknown instruction 'boost'; known are retry, respawn, drain"),
    ],
)
def test_reasons(events: list[Event], reason: str) -> None:
    health, said = Health(), ""
    for event in events:
        health, said = advance(health, event)
    assert said == reason
