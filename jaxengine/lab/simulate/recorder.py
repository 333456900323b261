"""The real engine in this process with a stopwatch: every step's shape and times, and requests
driven in real time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from jaxengine.engine.core import EngineCore
from jaxengine.lab.bench.datasets import BenchRequest, prompt_tokens
from jaxengine.lab.simulate.clock import Clock
from jaxengine.lab.simulate.cost import StepShape
from jaxengine.lab.simulate.outcome import Outcome, RankFigures, Record
from jaxengine.lab.simulate.table import Sample, Work
from jaxengine.lab.tap import tapped
from jaxengine.sampling_params import SamplingParams
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.wire.messages import EngineRequest

# A result that took less than this share of its step to come was there before it was asked for.
WAITED = 0.05


@dataclass
class _Step:
    shape: StepShape
    batch: Batch
    plan_s: float
    submitted: float
    done: float = 0.0
    device_s: float = 0.0
    exact: bool = False  # the host was there when the device began and ended the step


class Recorder:
    """Stands between a core and its executor. The core has one shard and no drafts."""

    def __init__(self, core: EngineCore, rows_per_turn: int, clock: Clock) -> None:
        self._now = clock.now
        self.core = core
        self.samples: list[Sample] = []
        self._rows_per_turn = rows_per_turn
        self._plan: tuple[float, StepPlan] | None = None
        self._flight: deque[_Step] = deque()
        self._finished: _Step | None = None
        self._last_done = 0.0
        self._waited = False
        self._wrapped = ExitStack()
        self._wrapped.enter_context(tapped(core.scheduler, schedule=self._scheduled))
        self._wrapped.enter_context(
            tapped(core.executor, submit=self._submitted, result=self._resulted)
        )

    def close(self) -> None:
        """The core is as it was."""
        self._wrapped.close()

    def step(self) -> list[Any]:
        """`core.step`; a step that it finished becomes a sample."""
        outputs = self.core.step()
        step, self._finished = self._finished, None
        if step is not None:
            bucket = step.batch.bucket
            work = Work.of(step.shape, bucket, self._rows_per_turn, step.batch.sampler_rows)
            counts = step.shape.counts
            self.samples.append(
                Sample(
                    bucket.tokens,
                    bucket.decode_only,
                    step.shape.rows,
                    len(counts),
                    int(counts.sum()),
                    work,
                    step.plan_s,
                    step.device_s,
                    self._now() - step.done,
                    step.exact,
                )
            )
        return outputs

    def _scheduled(self, schedule: Callable[[], StepPlan | None]) -> StepPlan | None:
        began = self._now()
        plan = schedule()
        self._plan = None if plan is None else (began, plan)
        return plan

    def _submitted(self, submit: Callable[[Batch], Any], batch: Batch) -> Any:
        assert self._plan is not None
        began, plan = self._plan
        shape = StepShape.of(plan)
        handle = submit(batch)
        now = self._now()
        self._flight.append(_Step(shape, batch, now - began, now))
        return handle

    def _resulted(self, result: Callable[[Any], list[StepResult]], handle: Any) -> list[StepResult]:
        began = self._now()
        results = result(handle)
        step = self._flight.popleft()
        step.done = self._now()
        # In a pipeline a step's share is the time since the one before it.
        step.device_s = step.done - max(step.submitted, self._last_done)
        waited = step.done - began > WAITED * step.device_s
        step.exact = waited and (self._waited or step.submitted >= self._last_done)
        self._last_done, self._waited = step.done, waited
        self._finished = step
        return results


def engine_request(name: str, prompt: Sequence[int], output_len: int) -> EngineRequest:
    """Greedy, and to the last token."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    return EngineRequest(
        request_id=name, prompt_token_ids=list(prompt), params=params, arrival_time=time.time()
    )


def drive(
    core: EngineCore, requests: Sequence[BenchRequest], clock: Clock, seed: int, last: int
) -> Outcome:
    """Run requests, each at its arrival by the clock, as the engine process's loop would. `last`:
    the largest token id of prompts. Raises RuntimeError when one fails."""
    prompts = [prompt_tokens(r, seed, first=min(100, last), last=last) for r in requests]
    records = [Record(r.prompt_len, r.output_len, r.arrival) for r in requests]
    coming = deque(range(len(requests)))
    began = clock.now()
    end = 0.0
    while coming or core.has_work():
        now = clock.now() - began
        while coming and requests[coming[0]].arrival <= now:
            i = coming.popleft()
            core.add_request(engine_request(str(i), prompts[i], requests[i].output_len))
        if not core.has_work():
            clock.wait_until(began + requests[coming[0]].arrival)
            continue
        outputs = core.step()
        end = clock.now() - began
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            records[int(output.request_id)].times.extend([end] * len(output.new_token_ids))
    first = min(r.arrival for r in requests)
    return Outcome(records, [RankFigures()], end - first, core.facts.sched_sizes.max_num_seqs)
