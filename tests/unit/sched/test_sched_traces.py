"""The worked traces of the behaviour specification, number by number."""

from __future__ import annotations

import numpy as np
import pytest
from planning import config, planned

from jaxengine.sched.block_pool import BlockPool
from jaxengine.sched.config import GroupSpec
from jaxengine.sched.kv_cache import KVCache
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request, RequestStatus
from jaxengine.sched.scheduler import Scheduler
from jaxengine.sched.slots import SlotTable
from jaxengine.sched.updates import RequestUpdate


def answer(scheduler: Scheduler, plan: StepPlan, *rows: list[int]) -> list[RequestUpdate]:
    """Update with these sampled tokens, one list a row."""
    width = max(1, *(len(row) for row in rows))
    ids = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    counts = np.array([len(row) for row in rows], np.int32)
    updates = list(scheduler.update(plan, StepResult(token_ids=ids, num_sampled=counts)))
    scheduler.check_integrity()
    return updates


def counters(r: Request) -> tuple[int, int, int, int]:
    """computed, in flight, placeholders, tokens"""
    return (
        r.num_computed_tokens,
        r.num_in_flight_tokens,
        r.num_output_placeholders,
        r.num_tokens,
    )


def test_a1_async_without_drafts() -> None:
    scheduler = Scheduler(config())
    r = Request("r", [1, 2, 3, 4, 5], max_tokens=3)
    scheduler.add(r)
    s1 = planned(scheduler)
    assert counters(r) == (5, 5, 1, 5)
    assert s1.num_decode == 0 and s1.samples.tolist() == [True] and s1.new_requests == [r]
    s2 = planned(scheduler)
    assert counters(r) == (6, 6, 2, 5)
    assert s2.num_decode == 1 and s2.start.tolist() == [5] and s2.num_output.tolist() == [1]
    (update,) = answer(scheduler, s1, [11])
    assert (update.new_token_ids, update.first, update.finish_reason) == ([11], 0, None)
    assert counters(r) == (6, 1, 1, 6)
    s3 = planned(scheduler)
    assert counters(r) == (7, 2, 2, 6)
    answer(scheduler, s2, [12])
    assert counters(r) == (7, 1, 1, 7)
    assert scheduler.schedule() is None  # its last token is in flight
    (update,) = answer(scheduler, s3, [13])
    assert (update.first, update.finish_reason, update.stop_reason) == (2, "length", None)
    assert r.output_token_ids.tolist() == [11, 12, 13]
    assert not scheduler.has_work() and scheduler.kv_usage == 0


def test_a2_async_with_drafts() -> None:
    scheduler = Scheduler(config(max_drafts=2))
    r = Request("r", [1, 2, 3, 4, 5], max_tokens=20)
    scheduler.add(r)
    answer(scheduler, planned(scheduler), [11])
    assert counters(r) == (5, 0, 0, 6)
    scheduler.set_drafts(r, [-1, -1, -1])
    plan = planned(scheduler)
    assert plan.num_new.tolist() == [3] and plan.num_drafts.tolist() == [2]
    assert plan.num_decode == 1  # the last token and drafts behind it
    assert counters(r) == (8, 3, 3, 6)
    answer(scheduler, plan, [21, 22])  # one of two accepted
    assert counters(r) == (7, 0, 0, 8)
    scheduler.set_drafts(r, [-1, -1])
    plan = planned(scheduler)
    assert counters(r) == (10, 3, 3, 8)
    ahead = planned(scheduler)  # planned before the rejection is known
    assert ahead.num_new.tolist() == [1] and counters(r) == (11, 4, 4, 8)
    answer(scheduler, plan, [31])  # both rejected
    assert counters(r) == (9, 1, 1, 9)
    answer(scheduler, ahead, [41])
    assert counters(r) == (9, 0, 0, 10)


def test_a3_preempted_with_a_step_outstanding() -> None:
    scheduler = Scheduler(config())
    r = Request("r", list(range(20)), max_tokens=9)
    scheduler.add(r)
    first = planned(scheduler)
    answer(scheduler, first, [50])
    outstanding = planned(scheduler)
    assert counters(r) == (21, 1, 1, 21)
    _preempt_by_force(scheduler, r)
    assert counters(r) == (0, 1, 0, 21)
    assert (r.num_stale_output_tokens, r.status, r.slot) == (1, RequestStatus.PREEMPTED, -1)
    assert scheduler.schedule() is None  # its late output must come first
    (update,) = answer(scheduler, outstanding, [51])
    assert (update.new_token_ids, update.first) == ([51], 1)
    assert counters(r) == (0, 0, 0, 22)
    resumed = planned(scheduler)
    # Blocks of the first 20 tokens are hit; the rest is fed from the host.
    assert resumed.num_decode == 0 and resumed.new_requests == [r] and resumed.preempted == [r]
    assert (resumed.start.tolist(), resumed.num_new.tolist()) == ([20], [2])
    assert r.num_cached_tokens == 0 and scheduler.prefix_hits == 0
    assert scheduler.state.prefix.preempted_hits == 20


def test_a3_late_output_may_end_a_preempted_request() -> None:
    scheduler = Scheduler(config())
    r = Request("r", list(range(8)), max_tokens=9, stop_token_ids=[51])
    scheduler.add(r)
    outstanding = planned(scheduler)
    _preempt_by_force(scheduler, r)
    (update,) = answer(scheduler, outstanding, [51])
    assert (update.finish_reason, update.stop_reason) == ("stop", 51)
    assert not scheduler.has_work() and r.is_finished


def test_second_preemption_with_dropped_output() -> None:
    scheduler = Scheduler(config())
    r = Request("r", list(range(8)), max_tokens=9)
    scheduler.add(r)
    one = planned(scheduler)
    assert scheduler.reset_prefix_cache(reset_running=True)
    two = planned(scheduler)  # resumes at once: the old output will be ignored
    assert two.new_requests == [r] and counters(r) == (8, 16, 1, 8)
    _preempt_by_force(scheduler, r)
    assert r.num_stale_output_tokens == 16 and r.drop_stale
    assert answer(scheduler, one, [50]) == []
    assert answer(scheduler, two, [50]) == []  # sticky while an undrained share exists
    assert counters(r) == (0, 0, 0, 8) and not r.drop_stale
    (update,) = answer(scheduler, planned(scheduler), [50])
    assert update.new_token_ids == [50] and update.first == 0


def _preempt_by_force(scheduler: Scheduler, request: Request) -> None:
    from jaxengine.sched.state import preempt

    preempt(scheduler.state, request)
    scheduler.check_integrity()


def _hybrid(window: int) -> tuple[KVCache, Request]:
    cfg = config(groups=(GroupSpec(0), GroupSpec(window)), num_blocks=32)
    kv = KVCache(cfg, SlotTable(4, 64), record_events=False)
    request = Request("r", list(range(33)), max_tokens=1)
    hashes = kv.hash_blocks(request)
    assert len(hashes) == 8
    for i in range(8):
        kv.pool.register(i, 0, hashes[i])
    for i in (2, 3, 6):
        kv.pool.register(10 + i, 1, hashes[i])
    return kv, request


def test_a5_hybrid_hit_by_fixed_point() -> None:
    kv, request = _hybrid(window=8)
    hit = kv.find_prefix(request)
    null = kv.pool.null
    assert hit.num_blocks == 4
    assert hit.blocks == [[0, 1, 2, 3], [null, null, 12, 13]]


@pytest.mark.parametrize(("window", "blocks"), [(1, 8), (2, 7), (5, 7), (6, 4), (9, 4), (10, 0)])
def test_hybrid_hit_for_other_windows(window: int, blocks: int) -> None:
    kv, request = _hybrid(window)
    assert kv.find_prefix(request).num_blocks == blocks


def test_a6_free_order() -> None:
    pool = BlockPool(6)
    a, b, c, d = pool.take(4)
    for block in (a, b, c):
        pool.register(block, 0, bytes([block]))
    pool.release([d, c, b, a])
    assert pool.free_order() == [d, 4, 5, c, b, a]
