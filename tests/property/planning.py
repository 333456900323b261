"""Small schedulers, their requests, and steps by hand."""

from __future__ import annotations

import numpy as np

from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler
from jaxengine.sched.updates import RequestUpdate


def config(**changes: object) -> SchedulerSizes:
    """A small scheduler, but for what `changes`."""
    base: dict[str, object] = dict(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_size=4,
        num_blocks=64,
    )
    return SchedulerSizes(**(base | changes))  # type: ignore[arg-type]


def request(name: str, length: int = 6, max_tokens: int = 8, **more: object) -> Request:
    seed = sum(name.encode())
    tokens = [seed + i for i in range(length)]
    return Request(name, tokens, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def planned(scheduler: Scheduler) -> StepPlan:
    """The next step, which there must be."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check_integrity()
    return plan


def answer(scheduler: Scheduler, plan: StepPlan, token: int = 7) -> list[RequestUpdate]:
    """Every sampling row gets `token`."""
    ids = np.full((plan.num_rows, 1), token, np.int32)
    result = StepResult(token_ids=ids, num_sampled=plan.samples.astype(np.int32))
    updates = list(scheduler.update(plan, result))
    scheduler.check_integrity()
    return updates


def names(plan: StepPlan) -> list[str]:
    return [r.request_id for r in plan.requests]
