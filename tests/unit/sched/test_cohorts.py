"""Pipeline stages: running requests form cohorts that are planned in turn."""

import numpy as np

from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler


def result(plan: StepPlan) -> StepResult:
    return StepResult(np.full((plan.num_rows, 1), 7, np.int32), plan.samples.astype(np.int32), None)


def test_stages_are_kept_full() -> None:
    stages, requests = 3, 7
    config = SchedulerSizes(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, block_size=4,
        num_blocks=64, num_cohorts=stages,
    )  # fmt: skip
    scheduler = Scheduler(config)
    for i in range(requests):
        scheduler.add(Request(str(i), [1, 2, 3 + i], max_tokens=12))
    inflight: list[StepPlan] = []
    ended: list[str] = []
    for step in range(200):
        if len(inflight) <= stages and scheduler.has_work():
            plan = scheduler.schedule()
            if plan is not None:
                inflight.append(plan)
                if step > 4 * stages and not ended:
                    # No request of one step is in the next ones: each stage has its own.
                    names = [{r.request_id for r in p.requests} for p in inflight[-stages:]]
                    assert sum(map(len, names)) == len(set().union(*names))
                    assert 1 <= plan.num_rows <= 3
                continue
        if not inflight:
            break
        plan = inflight.pop(0)
        ended += [
            u.request.request_id for u in scheduler.update(plan, result(plan)) if u.finish_reason
        ]
        scheduler.check_integrity()
    assert sorted(ended) == [str(i) for i in range(requests)]
