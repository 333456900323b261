"""How requests end: stops, aborts, pauses, faults, bad rows."""

from __future__ import annotations

import numpy as np
import pytest
from planning import answer, config, names, planned, request

from jaxengine.sched.plan import StepResult
from jaxengine.sched.request import Request, RequestStatus
from jaxengine.sched.scheduler import Scheduler


def test_eos_stop_id_and_length_in_this_order() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("eos", eos_token_ids=[7], stop_token_ids=[7]))
    scheduler.add(request("stop", stop_token_ids=[9, 7, 1, 2, 3, 4, 5]))
    scheduler.add(request("length", max_tokens=1))
    scheduler.add(request("goes-on", min_tokens=3))
    ends = {
        u.request.request_id: (u.finish_reason, u.stop_reason)
        for u in answer(scheduler, planned(scheduler))
    }
    assert ends == {
        "eos": ("stop", None),
        "stop": ("stop", 7),
        "length": ("length", None),
        "goes-on": (None, None),
    }


def test_surplus_step_of_a_stopped_request_is_not_shown() -> None:
    scheduler = Scheduler(config())
    r = request("a", eos_token_ids=[7])
    scheduler.add(r)
    one, two = planned(scheduler), planned(scheduler)
    scheduler.add(request("b", 6))
    three = planned(scheduler)
    assert [u.finish_reason for u in answer(scheduler, one)] == ["stop"]
    scheduler.add(request("c"))
    four = planned(scheduler)
    assert four.requests[-1].slot == 0  # the slot of `a`, whose steps are still in flight
    assert answer(scheduler, two) == []
    assert [u.request.request_id for u in answer(scheduler, three)] == ["b"]
    assert [u.request.request_id for u in answer(scheduler, four)] == ["b", "c"]
    assert r.output_token_ids.tolist() == [7]


def test_abort_is_idempotent_and_frees_at_once() -> None:
    scheduler = Scheduler(config())
    for name in "abc":
        scheduler.add(request(name))
    plan = planned(scheduler)
    assert [r.request_id for r in scheduler.abort(["b", "b", "zz"])] == ["b"]
    assert scheduler.abort(["b"]) == []
    assert [u.request.request_id for u in answer(scheduler, plan)] == ["a", "c"]
    assert len(scheduler.abort()) == 2 and scheduler.kv_usage == 0
    scheduler.check_integrity()


def test_pause_modes() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a"))
    answer(scheduler, planned(scheduler))
    scheduler.add(request("b"))
    scheduler.pause("keep")
    assert scheduler.schedule() is None and not scheduler.has_work()
    scheduler.pause("wait")
    plan = planned(scheduler)
    assert names(plan) == ["a"]
    answer(scheduler, plan)
    scheduler.resume()
    assert names(planned(scheduler)) == ["a", "b"]
    assert [r.request_id for r in scheduler.pause("abort")] == ["a", "b"]
    assert not scheduler.has_work() and scheduler.is_paused
    with pytest.raises(ValueError, match="pause mode"):
        scheduler.pause("now")


@pytest.mark.parametrize(("kv_lost", "hit"), [(True, 0), (False, 8)])
def test_fault_ends_what_was_running_and_forgets_uncertain_blocks(kv_lost: bool, hit: int) -> None:
    scheduler = Scheduler(config(max_num_seqs=2))
    tokens = list(range(20))
    scheduler.add(Request("done", tokens[:9], max_tokens=1))
    answer(scheduler, planned(scheduler))  # two blocks for certain
    scheduler.add(Request("a", tokens, max_tokens=5))
    scheduler.add(request("b"))
    scheduler.add(request("queued"))
    planned(scheduler)
    assert [r.request_id for r in scheduler.on_fault(kv_lost)] == ["a", "b"]
    scheduler.check_integrity()
    assert scheduler.kv_usage == 0 and scheduler.num_waiting == 1
    assert scheduler.num_in_flight_steps == 0
    again = Request("again", tokens, max_tokens=5)
    scheduler.add(again)
    assert names(planned(scheduler)) == ["queued", "again"]
    assert again.num_cached_tokens == hit


def test_bad_row_ends_with_error_and_leaves_nothing_in_the_cache() -> None:
    scheduler = Scheduler(config())
    r = request("a", 9)
    scheduler.add(r)
    scheduler.add(request("b", 9))
    plan = planned(scheduler)
    ids = np.full((2, 1), 7, np.int32)
    bad = np.array([True, False])
    result = StepResult(token_ids=ids, num_sampled=np.ones(2, np.int32), bad_rows=bad)
    updates = list(scheduler.update(plan, result))
    scheduler.check_integrity()
    assert [(u.new_token_ids, u.finish_reason) for u in updates] == [([], "error"), ([7], None)]
    assert r.status is RequestStatus.FINISHED_ERROR
    again = Request("again", r.token_ids, max_tokens=1)
    scheduler.add(again)
    planned(scheduler)
    assert again.num_cached_tokens == 0
