"""Who gets into a step: limits, budgets, chunks, policies, preemption."""

from __future__ import annotations

import pytest
from planning import answer, config, names, planned, request

from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, "enable_chunked_prefill"),
        ({"policy": "lifo"}, "policy"),
        ({"prefix_caching_hash_algo": "md5"}, "prefix_caching_hash_algo"),
        ({"watermark": 1.0}, "watermark"),
        ({"groups": ()}, "groups"),
        ({"num_blocks": 0}, "num_blocks"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(config(**changes))


def test_requests_that_cannot_be_are_refused() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a"))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        scheduler.add(request("a"))
    with pytest.raises(ValueError, match="prompt_token_ids"):
        scheduler.add(Request("b", [], max_tokens=1))
    with pytest.raises(ValueError, match="max_tokens"):
        request("c", max_tokens=-1)


def test_decode_rows_come_first_and_share_the_budget_with_chunks() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=10))
    scheduler.add(request("a"))
    answer(scheduler, planned(scheduler))
    scheduler.add(request("long", 25))
    plan = planned(scheduler)
    assert names(plan) == ["a", "long"] and plan.num_decode == 1
    assert plan.num_new.tolist() == [1, 9] and plan.samples.tolist() == [True, False]
    assert [u.request.request_id for u in answer(scheduler, plan)] == ["a"]
    scheduler.add(request("b"))
    plan = planned(scheduler)
    assert (names(plan), plan.num_new.tolist()) == (["a", "long"], [1, 9])
    answer(scheduler, plan)
    plan = planned(scheduler)  # the last 7 tokens, and what is left of the budget for b
    assert (names(plan), plan.num_new.tolist()) == (["a", "long", "b"], [1, 7, 2])
    assert plan.samples.tolist() == [True, True, False]


def test_a_last_chunk_of_one_token_is_no_decode_row() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=5))
    scheduler.add(request("a", 6))
    assert answer(scheduler, planned(scheduler)) == []
    plan = planned(scheduler)
    assert plan.num_new.tolist() == [1] and plan.num_decode == 0 and plan.samples.all()
    answer(scheduler, plan)
    assert planned(scheduler).num_decode == 1


def test_long_prefill_threshold_only_while_others_wait() -> None:
    scheduler = Scheduler(config(long_prefill_token_threshold=8))
    scheduler.add(request("a", 30))
    assert planned(scheduler).num_new.tolist() == [30]
    scheduler = Scheduler(config(long_prefill_token_threshold=8))
    scheduler.add(request("a", 30))
    scheduler.add(request("b", 20))
    assert planned(scheduler).num_new.tolist() == [8, 8]


def test_unchunked_prompt_waits_for_a_step_with_room() -> None:
    scheduler = Scheduler(config(enable_chunked_prefill=False))
    scheduler.add(request("a", 40))
    scheduler.add(request("b", 30))
    plan = planned(scheduler)
    assert names(plan) == ["a"]
    answer(scheduler, plan)
    assert names(planned(scheduler)) == ["a", "b"]


def test_preemption_takes_the_last_and_brings_it_back_first() -> None:
    scheduler = Scheduler(config(num_blocks=5, enable_prefix_caching=False))
    for name in "ab":
        scheduler.add(request(name, 7, 20))
    scheduler.add(request("c", 7, 20))
    answer(scheduler, planned(scheduler))
    answer(scheduler, planned(scheduler))
    plan = planned(scheduler)
    assert names(plan) == ["a"] and [r.request_id for r in plan.preempted] == ["b"]
    assert [r.request_id for r in scheduler.state.waiting] == ["b", "c"]
    assert scheduler.num_preemptions == 1


def test_priority_admits_the_lowest_and_preempts_the_highest() -> None:
    scheduler = Scheduler(config(num_blocks=6, policy="priority", enable_prefix_caching=False))
    scheduler.add(request("low", 7, 20, priority=5, arrival_time=0.0))
    scheduler.add(request("high", 7, 20, priority=1, arrival_time=2.0))
    scheduler.add(request("mid", 7, 20, priority=3, arrival_time=1.0))
    plan = planned(scheduler)
    assert names(plan) == ["high", "mid", "low"]
    answer(scheduler, plan)
    answer(scheduler, planned(scheduler))
    plan = planned(scheduler)
    assert names(plan) == ["high", "mid"] and [r.request_id for r in plan.preempted] == ["low"]


def test_whole_prompt_and_watermark_at_admission() -> None:
    for changes, fits in [({}, 1), ({"reserve_full_prompt": False}, 2), ({"watermark": 0.5}, 1)]:
        scheduler = Scheduler(config(num_blocks=10, max_num_batched_tokens=24, **changes))
        scheduler.add(request("a", 20))
        scheduler.add(request("b", 24))
        assert planned(scheduler).num_rows == fits
