"""KV from outside of the pool: loads, their failures, aborts and faults meanwhile."""

from __future__ import annotations

from planning import answer, config, names, planned, request

from jaxengine.sched.connector import LoadResult
from jaxengine.sched.plan import StepPlan
from jaxengine.sched.request import Request, RequestStatus
from jaxengine.sched.scheduler import Scheduler


class HostCache:
    """A connector that can load `size` tokens of every prompt, when told to."""

    def __init__(self, size: int) -> None:
        self.size, self.loads, self.finished = size, [], []  # type: ignore[var-annotated]
        self.answer: int | None = size

    def on_new_request(self, request: Request) -> None:
        assert request.status is RequestStatus.WAITING

    def matched_tokens(self, request: Request, num_local: int) -> int | None:
        return None if self.answer is None else max(0, self.answer - num_local)

    def after_alloc(
        self, request: Request, block_ids: list[list[int]], num_local: int, num_external: int
    ) -> None:
        if num_external:
            self.loads.append((request.request_id, len(block_ids[0]), num_local, num_external))

    def build_step(self, plan: StepPlan) -> object:
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
    assert plan.connector_meta == "meta"
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
