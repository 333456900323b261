"""One engine in virtual time: the real scheduler behind the core's step loop.

As in `engine.core`: at most `depth` steps are in flight; with room in the pipeline the host plans
ahead, else it waits for the oldest result. Host and device are two clocks: a step starts on the
device when it was submitted and the step before it has ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxengine.lab.simulate.cost import CostModel, StepShape
from jaxengine.lab.simulate.outcome import RankFigures, Record
from jaxengine.lab.simulate.tiers import HostMemory
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler

# Every sampled token. Equal prompts give equal answers, as greedy ones do.
TOKEN = 7
IDLE_POLL = 0.001  # seconds; the core's, when all that is left waits for something else


@dataclass
class _Step:
    plan: StepPlan
    done: float  # when the device has its result
    finish_s: float


class Rank:
    """Driven by `cluster`: `add` requests, call `turn` when it says. One rank is one engine."""

    def __init__(
        self, sched_sizes: SchedulerSizes, cost: CostModel, depth: int, tier: HostMemory | None
    ) -> None:
        self.figures = RankFigures()
        self.now = 0.0  # the host's clock
        self._cost = cost
        self._depth = depth
        self._tier = tier
        self.scheduler = Scheduler(sched_sizes, connector=tier.connector if tier else None)
        if tier is not None:
            tier.connector.bind(self.scheduler.state.kv)
        self._inflight: deque[_Step] = deque()
        self._device_free = 0.0
        self._waits = False  # for the oldest step
        self._follows = False  # the next step follows one without an idle time between
        self.is_idle = True
        self.records: dict[str, Record] = {}

    # -- what the cluster asks ----------------------------------------------------------------

    def add(self, request: Request, record: Record) -> None:
        """Queue a request. Raises ValueError for one that can never run."""
        self.scheduler.add(request)
        self.records[request.request_id] = record
        self.figures.requests += 1

    def turn(self, now: float) -> tuple[float | None, list[str]]:
        """The loop at `now`: ends the step that was waited for, plans the next.

        Returns when to call again (None: when a request comes), and who ended.
        """
        self.now = now
        self.is_idle = False
        ended = self._finish(now) if self._waits else []
        if self._tier is not None:
            self._tier.advance(now)
        planned = len(self._inflight) < self._depth and self._plan()
        if planned and len(self._inflight) < self._depth:
            return self.now, ended
        if self._inflight:
            oldest = self._inflight[0]
            self._waits = True
            return max(self.now, oldest.done) + oldest.finish_s, ended
        pending = self._tier is not None and self._tier.connector.has_pending()
        if self.scheduler.has_work() or pending:
            next_end = self._tier.next_end() if self._tier is not None else None
            return max(self.now, next_end or self.now + IDLE_POLL), ended
        self.is_idle, self._follows = True, False
        return None, ended

    # -- the two halves of a step -------------------------------------------------------------

    def _plan(self) -> bool:
        scheduler = self.scheduler
        plan = scheduler.schedule() if scheduler.has_work() else None
        if self._tier is not None:
            self._tier.dispatch(plan, self.now)
        figures = self.figures
        waiting = scheduler.num_waiting
        figures.most_waiting = max(figures.most_waiting, waiting)
        if plan is None:
            return False
        cost = self._cost.step(StepShape.of(plan))
        for request in plan.new_requests:
            record = self.records[request.request_id]
            if record.scheduled < 0:
                record.scheduled = self.now
        if waiting:
            figures.obstacles[obstacle(scheduler, plan)] += 1
        self.now += cost.plan_s
        start = max(self.now, self._device_free)
        if self._follows:
            figures.starved_s += start - self._device_free
        self._follows = True
        self._device_free = start + cost.device_s
        self._inflight.append(_Step(plan, self._device_free, cost.finish_s))
        figures.steps += 1
        figures.tokens += plan.num_tokens
        figures.rows += plan.num_rows
        figures.device_s += cost.device_s
        figures.host_s += cost.plan_s + cost.finish_s
        figures.bounds[cost.bound] = figures.bounds.get(cost.bound, 0.0) + cost.device_s
        usage = scheduler.kv_usage
        figures.kv_peak, figures.kv_sum = max(figures.kv_peak, usage), figures.kv_sum + usage
        return True

    def _finish(self, now: float) -> list[str]:
        self._waits = False
        step = self._inflight.popleft()
        plan = step.plan
        result = StepResult(
            np.full((plan.num_rows, 1), TOKEN, np.int32), plan.samples.astype(np.int32)
        )
        updates = self.scheduler.update(plan, result)
        for request, count in zip(updates.requests, updates.num_new.tolist(), strict=True):
            if count:
                self.records[request.request_id].times.append(now)
        ended = [plan.requests[row] for row in updates.finished]
        for request in ended:
            record = self.records.pop(request.request_id)
            record.cached, record.preemptions = request.num_cached_tokens, request.num_preemptions
        return [request.request_id for request in ended]

    def close(self) -> RankFigures:
        """The run is over: its figures, with the counters of scheduler and tier."""
        figures, scheduler = self.figures, self.scheduler
        figures.preemptions = scheduler.num_preemptions
        figures.prefix_queries = scheduler.prefix_queries
        figures.prefix_hits = scheduler.prefix_hits
        figures.kv_end = scheduler.kv_usage
        if self._tier is not None:
            self._tier.count(figures)
        return figures


def obstacle(scheduler: Scheduler, plan: StepPlan) -> str:
    """Why somebody still waits after this plan: slots, tokens (the step is full), loads (KV on
    its way from host memory) or blocks."""
    state, config = scheduler.state, scheduler.config
    if not state.table.free:
        return "slots"
    if plan.num_tokens >= config.max_num_batched_tokens:
        return "tokens"
    if plan.preempted or not state.loading:
        return "blocks"
    return "loads"
