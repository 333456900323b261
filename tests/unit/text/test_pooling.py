"""Sums of hidden states over chunks: right however often and wherever a prompt begins again."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine.engine.pooling import NO_ROW, Pooled, pool_index
from jaxengine.sched.batch import first_tokens
from jaxengine.sched.config import GroupSpec, SchedulerSizes
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler

TOKENS, D = 16, 3
PLANNER = SchedulerSizes(
    max_num_seqs=4,
    max_num_batched_tokens=TOKENS,
    max_model_len=96,
    num_blocks=24,  # few: requests are preempted
    block_size=4,
    groups=(GroupSpec(0),),
)


def _requests(rng: Any, pooling: str) -> tuple[list[Request], dict[str, Any]]:
    """Embeddings between requests that grow and take their blocks; hidden states by request."""
    requests, hidden = [], {}
    for i in range(12):
        ids = rng.integers(3, 200, int(rng.integers(1, 60))).tolist()
        wants = pooling if i % 2 else None
        request = Request(
            f"r{i}",
            ids if wants else ids[:20],
            max_tokens=1 if wants else int(rng.integers(5, 50)),
            params=SimpleNamespace(wire=SimpleNamespace(pooling=wants)),
            skip_reading_prefix_cache=wants == "mean",
        )
        requests.append(request)
        hidden[request.request_id] = rng.random((len(ids) + 50, D), dtype=np.float32)
    return requests, hidden


def _sums(plan: StepPlan, hidden: dict[str, Any]) -> Any:
    """What the device would bring: [rows, D], or None."""
    index = pool_index(plan, TOKENS)
    if index is None:
        return None
    sums, first = np.zeros((plan.num_rows, D), np.float32), first_tokens(plan)
    for row, request in enumerate(plan.requests):
        for i in range(int(plan.num_new[row])):
            counts_for = index[int(first[row]) + i]
            assert counts_for in (row, NO_ROW)
            if counts_for == row:
                sums[row] += hidden[request.request_id][int(plan.start[row]) + i]
    return sums


@pytest.mark.parametrize("resets", [False, True], ids=["preemption", "resets"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_that_begins_again_counts_once(pooling: str, resets: bool) -> None:
    preemptions = checked = 0
    for seed in range(25):
        rng, chance = np.random.default_rng(seed), random.Random(seed)
        scheduler, pooled = Scheduler(PLANNER), Pooled()
        requests, hidden = _requests(rng, pooling)
        for request in requests:
            scheduler.add(request)
        in_flight: deque[tuple[StepPlan, Any]] = deque()
        while scheduler.has_work() or in_flight:
            if resets and chance.random() < 0.05:
                scheduler.reset_prefix_cache(reset_running=True)
            if len(in_flight) < 2 and scheduler.has_work():
                plan = scheduler.schedule()
                if plan is not None:
                    in_flight.append((plan, _sums(plan, hidden)))
                    if len(in_flight) < 2:
                        continue
            if not in_flight:
                continue
            plan, sums = in_flight.popleft()
            if sums is not None:
                for row, request in enumerate(plan.requests):
                    if request.params.wire.pooling is not None:
                        pooled.add(request, int(plan.start[row]), sums[row])
            tokens = rng.integers(3, 200, (plan.num_rows, 1)).astype(np.int32)
            for update in scheduler.update(plan, StepResult(tokens, plan.samples.astype(np.int32))):
                request = update.request
                if request.params.wire.pooling is None:
                    continue
                states = hidden[request.request_id][: request.num_prompt_tokens]
                wanted = states[-1] if pooling == "last" else states.mean(0)
                found = np.frombuffer(pooled.take(request), np.float32)
                np.testing.assert_allclose(found, wanted, rtol=1e-4)
                checked += 1
        preemptions += scheduler.num_preemptions
        assert not pooled._parts
    assert checked == 25 * 6 and preemptions > 25
