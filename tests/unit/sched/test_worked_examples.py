"""The worked examples in the docstrings of `settle`, `find_prefix` and `continuation`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxengine.front.ranks.replay import continuation
from jaxengine.sampling_params import SamplingParams
from jaxengine.sched.config import GroupSpec, SchedulerSizes
from jaxengine.sched.plan import StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler
from jaxengine.wire.messages import EngineRequest


def scheduler(**changes: Any) -> Scheduler:
    sizes = SchedulerSizes(
        max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=4, num_blocks=16
    )
    return Scheduler(replace(sizes, **changes))


def sampled(*tokens: int, count: int = 1) -> StepResult:
    return StepResult(np.array([tokens], np.int32), np.array([count], np.int32))


def test_settle() -> None:
    one = scheduler(max_drafts=2)
    request = Request("r", [1, 2, 3, 4], max_tokens=9)
    one.add(request)
    plan = one.schedule()
    assert plan is not None
    one.update(plan, sampled(5))
    names = ("num_tokens", "num_computed", "placeholders", "pending", "in_flight")

    def counters() -> list[int]:
        return [int(getattr(one.state.table, name)[request.slot]) for name in names]

    assert counters() == [5, 4, 0, 0, 0]
    one.set_drafts(request, [8, 6])
    plan = one.schedule()
    assert plan is not None and plan.num_tokens == 3
    assert counters() == [5, 7, 3, 1, 3]
    one.update(plan, sampled(8, 9, -1, count=2))
    assert counters() == [7, 6, 0, 0, 0]
    assert request.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9]


def test_find_prefix() -> None:
    one = scheduler(groups=(GroupSpec(0), GroupSpec(5)))
    cache, pool = one.state.kv, one.state.kv.pool
    prompt = list(range(13))
    hashes = cache.hash_blocks(Request("p", prompt, max_tokens=1))
    assert len(hashes) == 3
    full, window = pool.take(2), pool.take(2)
    for group, blocks in enumerate((full, window)):
        for block, digest in zip(blocks, hashes, strict=False):
            pool.register(block, group, digest)
    pool.unregister(window[0])
    for length in (13, 12):
        hit = cache.find_prefix(Request("r", prompt[:length], max_tokens=1))
        assert hit.num_blocks == 2
        assert hit.blocks == [full, [pool.null, window[1]]]


def asked(params: SamplingParams) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        params=params,
        arrival_time=0.0,
        eos_token_ids=[2],
    )


def test_continuation() -> None:
    params = SamplingParams(max_tokens=10, temperature=0)
    request = asked(params)
    again, dropped = continuation(request, [7, 8], scored=False)
    assert again.prompt_token_ids == [1, 2, 3, 7, 8]
    assert (again.params.max_tokens, dropped) == (8, 0)
    penalised = asked(SamplingParams(presence_penalty=1.0))
    assert continuation(penalised, [7, 8], scored=False) == (penalised, 2)
