"""Policies, limits, stops, pauses, faults, grammars and connectors of the planner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jaxengine.sched.config import GroupSpec, PlannerConfig
from jaxengine.sched.connector import LoadResult
from jaxengine.sched.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from jaxengine.sched.plan import Int32, StepPlan, StepResult
from jaxengine.sched.request import Request, RequestStatus
from jaxengine.sched.scheduler import Scheduler
from jaxengine.sched.updates import RequestUpdate


def config(**changes: object) -> PlannerConfig:
    base: dict[str, object] = dict(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_size=4,
        num_blocks=64,
    )
    return PlannerConfig(**(base | changes))  # type: ignore[arg-type]


def request(name: str, length: int = 6, max_tokens: int = 8, **more: object) -> Request:
    seed = sum(name.encode())
    tokens = [seed + i for i in range(length)]
    return Request(name, tokens, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def planned(scheduler: Scheduler) -> StepPlan:
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


def test_salts_keep_prefixes_apart_and_counters_count_once() -> None:
    scheduler = Scheduler(config())
    tokens = list(range(17))
    for name, salt, hit in [("a", None, 0), ("b", None, 16), ("c", "x", 0), ("d", "x", 16)]:
        r = Request(name, tokens, max_tokens=1, cache_salt=salt)
        scheduler.add(r)
        answer(scheduler, planned(scheduler))
        assert r.num_cached_tokens == hit
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (4 * 17, 32)
    r = Request("e", tokens, max_tokens=1, skip_reading_prefix_cache=True)
    scheduler.add(r)
    answer(scheduler, planned(scheduler))
    assert r.num_cached_tokens == 0


def test_blocks_of_output_are_found_by_the_next_turn() -> None:
    scheduler = Scheduler(config())
    r = request("a", 6, 8)
    scheduler.add(r)
    flight = [planned(scheduler)]
    while scheduler.has_work():
        plan = scheduler.schedule()
        flight += [plan] if plan else []
        answer(scheduler, flight.pop(0))
    turn = Request("b", [*r.token_ids.tolist(), 1, 2, 3], max_tokens=1)
    scheduler.add(turn)
    planned(scheduler)
    assert turn.num_cached_tokens == 12  # 13 of 14 tokens had KV: the last sampled one has none


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


def test_reset_prefix_cache_needs_an_empty_pool() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a"))
    answer(scheduler, planned(scheduler))
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running=True)
    assert planned(scheduler).start.tolist() == [0]


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


def test_events_tell_what_is_stored_and_removed() -> None:
    scheduler = Scheduler(config(num_blocks=3, max_model_len=12), record_events=True)
    scheduler.add(Request("a", range(9), max_tokens=1))  # type: ignore[arg-type]
    answer(scheduler, planned(scheduler))
    (stored,) = scheduler.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == list(range(8)) and stored.parent_block_hash is None
    scheduler.add(request("b", 11))
    answer(scheduler, planned(scheduler))
    events = scheduler.take_events()
    removed = [e.block_hashes[0] for e in events if isinstance(e, BlockRemoved)]
    assert sorted(removed) == sorted(stored.block_hashes)
    scheduler.abort()
    assert scheduler.reset_prefix_cache()
    assert isinstance(scheduler.take_events()[-1], AllBlocksCleared)


def test_window_blocks_are_freed_by_processed_tokens() -> None:
    scheduler = Scheduler(config(groups=(GroupSpec(4),), max_num_batched_tokens=8))
    scheduler.add(request("a", 24))
    flight = [planned(scheduler)]
    (table,) = scheduler.block_tables
    flight.append(planned(scheduler))
    # 8 tokens are in flight and may still read everything they saw.
    assert (table[0, :4] < 64).all()
    answer(scheduler, flight.pop(0))
    flight.append(planned(scheduler))
    # 8 processed: the next token looks back to position 5, in block 1.
    assert (table[0, :6] < 64).tolist() == [False, True, True, True, True, True]


class DigitGrammar:
    """Allows tokens below 10; `ready` by hand."""

    def __init__(self) -> None:
        self.ready, self.terminated, self.over = False, False, False
        self.accepted: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> bool:
        self.accepted += token_ids
        return all(token < 10 for token in token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        return sum(token < 10 for token in token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[-num_tokens:]

    def fill_bitmask(self, row: Int32) -> None:
        row[:] = 0x3FF


def test_a_grammar_that_begins_late_and_ends_early() -> None:
    """Its masks are asked for from its first token on, and it sees the tokens before too; when it
    is over it is forgotten."""
    scheduler = Scheduler(config())
    grammar = DigitGrammar()
    grammar.ready = True
    scheduler.add(request("g", grammar=grammar, grammar_from=3))
    flight = [planned(scheduler)]
    constrained = []
    for _ in range(6):
        flight.append(planned(scheduler))
        answer(scheduler, flight[0])
        constrained.append(flight.pop(0).has_grammar)
        if len(constrained) == 5:
            assert len(grammar.accepted) == 5
            grammar.over = True
    assert constrained == [False, False, False, True, True, True]
    assert len(grammar.accepted) == 6
    answer(scheduler, flight.pop())
    assert len(grammar.accepted) == 6 and not planned(scheduler).has_grammar


def test_grammar_holds_its_request_back_and_sees_every_kept_token() -> None:
    scheduler = Scheduler(config())
    grammar = DigitGrammar()
    scheduler.add(request("g", grammar=grammar))
    scheduler.add(request("plain"))
    plan = planned(scheduler)
    assert names(plan) == ["plain"] and not plan.has_grammar
    answer(scheduler, plan)
    grammar.ready = True
    one = planned(scheduler)
    assert one.has_grammar and not one.pending_grammar
    two = planned(scheduler)
    assert two.pending_grammar
    answer(scheduler, one, 7)
    answer(scheduler, two, 8)
    assert grammar.accepted == [7, 8]
    updates = answer(scheduler, planned(scheduler), 70)
    assert [(u.request.request_id, u.finish_reason) for u in updates] == [
        ("plain", None),
        ("g", "error"),
    ]


class HostCache:
    """A connector that can load `size` tokens of every prompt, when told to."""

    def __init__(self, size: int) -> None:
        self.size, self.loads, self.finished = size, [], []  # type: ignore[var-annotated]
        self.answer: int | None = size
        self.new_blocks: list[int] = []

    def on_new_request(self, request: Request) -> None:
        assert request.status is RequestStatus.WAITING

    def matched_tokens(self, request: Request, num_local: int) -> int | None:
        return None if self.answer is None else max(0, self.answer - num_local)

    def after_alloc(
        self, request: Request, block_ids: list[list[int]], num_local: int, num_external: int
    ) -> None:
        if num_external:
            self.loads.append((request.request_id, len(block_ids[0]), num_local, num_external))

    def build_step(self, plan: StepPlan, new_blocks: list[int]) -> object:
        self.new_blocks = new_blocks
        return "meta"

    def take_finished_loads(self) -> list[LoadResult]:
        done, self.finished = self.finished, []
        return done

    def request_finished(self, request: Request, block_ids: list[list[int]]) -> None:
        assert request.slot >= 0

    def reset_cache(self) -> bool:
        return True

    def on_fault(self) -> None:
        self.finished.clear()


def test_external_load_then_prefill_of_the_rest() -> None:
    cache = HostCache(8)
    scheduler = Scheduler(config(), connector=cache)
    cache.answer = None
    r = request("a", 14, 2)
    scheduler.add(r)
    assert scheduler.schedule() is None and scheduler.has_work()  # asks again later
    cache.answer = 8
    assert scheduler.schedule() is None
    assert cache.loads == [("a", 2, 0, 8)]
    assert r.status is RequestStatus.WAITING_FOR_REMOTE_KVS and scheduler.num_waiting == 1
    scheduler.check_integrity()
    cache.finished = [LoadResult("a", 8), LoadResult("unknown", 4)]
    plan = planned(scheduler)
    assert (plan.start.tolist(), plan.num_new.tolist()) == ([8], [6])
    assert plan.connector_meta == "meta" and len(cache.new_blocks) == 4
    assert r.num_cached_tokens == 8 and plan.new_requests == [r]
    answer(scheduler, plan)
    twin = request("a", 14, 2)
    twin.request_id = "twin"
    scheduler.add(twin)
    planned(scheduler)
    assert twin.num_cached_tokens == 12  # local now: nothing to load


def test_failed_load_is_recomputed_and_abort_waits_for_the_load() -> None:
    cache = HostCache(8)
    scheduler = Scheduler(config(), connector=cache)
    scheduler.add(request("a", 14))
    scheduler.add(request("b", 14))
    assert scheduler.schedule() is None
    assert [r.request_id for r in scheduler.abort(["b"])] == ["b"]
    scheduler.check_integrity()
    assert scheduler.kv_usage > 0 and scheduler.num_waiting == 1
    cache.finished = [LoadResult("a", 4), LoadResult("b", 8)]
    plan = planned(scheduler)
    assert (names(plan), plan.start.tolist(), plan.num_new.tolist()) == (["a"], [4], [10])
    scheduler.abort()
    assert scheduler.kv_usage == 0
    scheduler.add(request("c", 14))
    assert scheduler.schedule() is None
    assert [r.request_id for r in scheduler.on_fault()] == ["c"]
    scheduler.check_integrity()
    assert scheduler.kv_usage == 0
