"""The states of an engine that survives its faults, and every move between them. Pure: whoever
holds the lock calls `advance`, and the first to do so wins.

                     fault, worker alive                 fault, worker gone
    HEALTHY/DRAINING ---------------------> UNHEALTHY    HEALTHY/DRAINING -----> DEAD
    UNHEALTHY  --retry, respawn-->  HEALTHY              DEAD  --respawn-->  HEALTHY
    UNHEALTHY  --worker gone, respawn failed-->  DEAD
    UNHEALTHY, DEAD  --no order in time-->  the process ends
    HEALTHY  --drain-->  DRAINING
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class State(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"  # a step failed; the worker lives
    DEAD = "dead"  # the worker is gone
    DRAINING = "draining"  # finishes what it has, takes nothing new


@dataclass(frozen=True)
class Health:
    """`recovering`: the order being carried out. `ended`: the time-out won; nothing counts any
    more. `drained`: a drain was ordered; a recovery leads back to it."""

    state: State = State.HEALTHY
    recovering: str | None = None
    ended: bool = False
    drained: bool = False

    @property
    def parked(self) -> bool:
        """The step loop stands still."""
        return self.state in (State.UNHEALTHY, State.DEAD)

    @property
    def admits(self) -> bool:
        """New requests are taken."""
        return self.state is State.HEALTHY


@dataclass(frozen=True)
class Fault:
    """A step raised."""

    worker_alive: bool


@dataclass(frozen=True)
class WorkerGone:
    """The worker ended while the loop stood still."""


@dataclass(frozen=True)
class Order:
    instruction: str


@dataclass(frozen=True)
class Timeout:
    """Nobody ordered anything in time."""


@dataclass(frozen=True)
class Recovered:
    pass


@dataclass(frozen=True)
class RecoveryFailed:
    worker_alive: bool


Event = Fault | WorkerGone | Order | Timeout | Recovered | RecoveryFailed

# Instruction: the states in which it is carried out.
INSTRUCTIONS: dict[str, tuple[State, ...]] = {
    "retry": (State.UNHEALTHY,),
    "respawn": (State.UNHEALTHY, State.DEAD),
    "drain": (State.HEALTHY,),
}


def advance(health: Health, event: Event) -> tuple[Health, str]:
    """The health after the event, and why it changes nothing ("" where it counts)."""
    if health.ended:
        return health, "the engine is ending: no order came in time"
    match event:
        case Order(instruction):
            return _order(health, instruction)
        case Fault(worker_alive):
            if health.parked:
                return health, "the engine stands still"
            return replace(health, state=_failed(worker_alive)), ""
        case WorkerGone():
            if health.state is not State.UNHEALTHY or health.recovering:
                return health, "a fault or the recovery will find out"
            return replace(health, state=State.DEAD), ""
        case Timeout():
            if not health.parked:
                return health, "nothing is being waited for"
            if health.recovering:
                return health, f"a {health.recovering} is in progress"
            return replace(health, ended=True), ""
        case Recovered():
            if not health.recovering:
                return health, "nothing was being recovered"
            state = State.DRAINING if health.drained else State.HEALTHY
            return replace(health, state=state, recovering=None), ""
        case RecoveryFailed(worker_alive):
            if not health.recovering:
                return health, "nothing was being recovered"
            return replace(health, state=_failed(worker_alive), recovering=None), ""


def _order(health: Health, instruction: str) -> tuple[Health, str]:
    states = INSTRUCTIONS.get(instruction)
    if states is None:
        known = ", ".join(INSTRUCTIONS)
        return health, f"unknown instruction {instruction!r}; known are {known}"
    if health.recovering:
        return health, f"rejecting {instruction}: a {health.recovering} is in progress"
    if health.state not in states:
        return health, f"rejecting {instruction}: the engine is {health.state}"
    if instruction == "drain":
        return replace(health, state=State.DRAINING, drained=True), ""
    return replace(health, recovering=instruction), ""


def _failed(worker_alive: bool) -> State:
    return State.UNHEALTHY if worker_alive else State.DEAD
