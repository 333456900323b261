"""Optional parts that an engine does without, each in its do-nothing form.

The step loop asks its parts alike whether they are there or not: the answers here are those of a
part that has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxengine.engine.packer import step_sizes
from jaxengine.sched.batch import Bucket
from jaxengine.sched.executor import Batch, Executor
from jaxengine.sched.kv_events import KVEvent
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.scheduler import Scheduler
from jaxengine.sched.updates import UpdateBatch


class NoEvents:
    """No KV events. See `engine.kv_events.KVEventPublisher`."""

    records = False

    def publish(self, events: list[KVEvent]) -> None:
        """Nobody listens."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is open."""


class NoDrafts:
    """No speculation. See `speculate.driver.Speculator`."""

    def choose(
        self, scheduler: Scheduler, in_flight: Sequence[Bucket], depth: int
    ) -> Bucket | None:
        return None

    def planned(self, plan: StepPlan) -> tuple[int, int]:
        return 0, 0

    def finished(
        self,
        plan: StepPlan,
        result: StepResult,
        update: UpdateBatch,
        planned: tuple[int, int],
        seconds: float,
    ) -> None:
        """Nothing was guessed."""

    def stats(self) -> dict[str, float]:
        return {}


class Alone:
    """No ranks that share experts: each step is the engine's own. See
    `engine.coupled.lockstep.Lockstep`."""

    running = False

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def takes_part(self, work: bool) -> bool:
        return True

    def shape(self, plans: Sequence[StepPlan | None], work: bool) -> tuple[Bucket, int] | None:
        """Forward bucket and sampler rows of a step with these plans; None when there is none."""
        if all(plan is None for plan in plans):
            return None
        return self._executor.choose(*step_sizes(plans))

    def submit(self, batch: Batch) -> Any:
        return self._executor.submit(batch)

    def failed(self, error: Exception) -> None:
        """Nobody else waits for the step."""

    def check_sleep(self) -> None:
        """It may."""

    def rejoin(self) -> bool:
        """There is no group to recover in."""
        return False

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is open."""


class InProcess:
    """No worker process: the device lives and dies with the engine. See
    `executor.worker.WorkerExecutor`."""

    alive = True
    epoch = 0

    def watch(self, on_end: Callable[[], None]) -> None:
        """There is no end to tell of."""

    def check(self) -> None:
        """It is there."""

    def respawn(self) -> None:
        """Raises ValueError."""
        raise ValueError("respawn needs --enable-fault-tolerance")
