"""The scheduler: who runs how many tokens in the next step, and what its result means.

`schedule` plans with counts, never with token values: it advances `num_computed` at once, books a
placeholder for every token a step will sample, and so can plan step N+1 while step N runs.
`update` replaces the placeholders by what came. Calling them in turn is the synchronous engine;
letting `schedule` run ahead is the asynchronous one. Nothing here differs between the two.

The parts, in reading order: `request`, `slots` and `state` (what is remembered), `rows` (the
arithmetic), `running` and `admission` (schedule), `reconcile` (update), `kv_cache` over
`block_pool` (blocks and prefixes).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from jaxengine.sched.admission import admit, take_finished_loads
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.connector import KVConnector
from jaxengine.sched.integrity import check_integrity
from jaxengine.sched.kv_cache import KVCache
from jaxengine.sched.kv_events import KVEvent
from jaxengine.sched.plan import Int32, StepPlan, StepResult
from jaxengine.sched.queue import make_queue
from jaxengine.sched.reconcile import reconcile
from jaxengine.sched.request import Request
from jaxengine.sched.rows import book
from jaxengine.sched.running import schedule_running
from jaxengine.sched.slots import SlotTable
from jaxengine.sched.state import SchedulerState, finish, preempt, release
from jaxengine.sched.updates import ABORTED, UpdateBatch


class CapacityError(ValueError):
    """The request can never run here: it does not fit the KV pool or the context."""


class Scheduler:
    """Owns all requests between `add` and their end. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerSizes,
        *,
        connector: KVConnector | None = None,
        record_events: bool = False,
    ) -> None:
        """Raises ValueError for settings that cannot work together."""
        _validate(config)
        table = SlotTable(config.max_num_seqs, config.max_model_len)
        kv = KVCache(config, table, record_events=record_events)
        self.config = config
        self.state = SchedulerState(config, table, kv, make_queue(config.policy), connector)
        self.num_scheduled_steps = 0
        self.num_processed_steps = 0
        self._max_feasible = kv.max_feasible_tokens()
        self._pause: str | None = None  # None | "wait" | "keep"

    @property
    def shards(self) -> Sequence[Scheduler]:
        """Itself: what is asked of each shard is asked of one scheduler alike."""
        return (self,)

    # -- requests ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for an empty prompt or an id in use, CapacityError
        when it can never run."""
        config, length, state = self.config, request.num_prompt_tokens, self.state
        if length == 0:
            raise ValueError("prompt_token_ids must hold at least one token")
        if request.request_id in state.requests or request.request_id in state.loading:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        limit = config.max_model_len - (request.max_tokens > 0)
        if length > limit:
            raise CapacityError(
                f"the prompt has {length} tokens, but max_model_len {config.max_model_len} "
                f"leaves room for {limit}"
            )
        if length > self._max_feasible:
            raise CapacityError(
                f"the prompt has {length} tokens, but the KV pool ({config.num_blocks} blocks of "
                f"{config.block_size} tokens) holds at most {self._max_feasible}"
            )
        # A request that is alone can always grow up to this length (the last token needs no KV),
        # so none is preempted for ever.
        request.stop_length = min(
            length + request.max_tokens, config.max_model_len, self._max_feasible + 1
        )
        request.queued_time = time.monotonic()
        state.requests[request.request_id] = request
        state.waiting.add(request)
        if state.connector is not None:
            state.connector.on_new_request(request)

    def abort(self, ids: Iterable[str] | None = None) -> list[Request]:
        """End these requests (None: all). Unknown and ended ids are skipped. Returns the aborted.

        Output of theirs that is in flight is dropped by `update`.
        """
        known = self.state.requests
        chosen = list(known) if ids is None else dict.fromkeys(ids)
        aborted = [known[i] for i in chosen if i in known]
        finish(self.state, [(request, ABORTED) for request in aborted])
        return aborted

    def set_drafts(self, request: Request, token_ids: list[int]) -> None:
        """Drafts to verify in the request's next step (-1: only the device knows the token).
        Ignored while the request is in prefill or not running."""
        if request.slot >= 0 and self.state.table.sampled[request.slot]:
            request.spec_token_ids = token_ids[: self.config.max_drafts]
            self.state.table.num_drafts[request.slot] = len(request.spec_token_ids)

    # -- steps ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when nothing can run now. Never waits."""
        cohorts = self.config.num_cohorts
        for _ in range(cohorts):
            plan = self._schedule_cohort()
            self.state.cohort = (self.state.cohort + 1) % cohorts
            if plan is not None:
                return plan
        return None

    def _schedule_cohort(self) -> StepPlan | None:
        state = self.state
        take_finished_loads(state)
        budget = 0 if self._pause == "keep" else self.config.max_num_batched_tokens
        preemptions = state.num_preemptions
        budget -= schedule_running(state, budget)
        # After a preemption blocks are short: admitting now would only take them away again.
        if self._pause is None and state.num_preemptions == preemptions:
            admit(state, budget)
        return self._make_plan()

    def update(self, plan: StepPlan, result: StepResult) -> UpdateBatch:
        """Take in the result of a plan. Results come in the order of the plans."""
        self.num_processed_steps += 1
        self.state.kv.step_done(plan.step_id)
        batch = reconcile(self.state, plan, result)
        if batch.finished:
            finish(self.state, [(plan.requests[row], end) for row, end in batch.finished.items()])
        return batch

    def _make_plan(self) -> StepPlan | None:
        """Book what was given, and register the full blocks that prefill rows will write."""
        state, table, running = self.state, self.state.table, self.state.running
        slots = state.running_slots()
        n = table.num_scheduled[slots]
        sampled = table.sampled[slots]
        decode = (n > 0) & sampled  # one token, and drafts behind it
        num_decode = int(np.count_nonzero(decode))
        if num_decode == len(running):
            requests = running.copy()
        else:
            rows = np.concatenate([np.flatnonzero(decode), np.flatnonzero((n > 0) & ~decode)])
            requests = [running[row] for row in rows.tolist()]
            slots, n, sampled = slots[rows], n[rows], sampled[rows]
        if not requests:
            return None
        drafts: Int32 = np.where(sampled, n - 1, 0)
        booking = book(table, slots, n, drafts)
        self.num_scheduled_steps += 1
        step_id = self.num_scheduled_steps
        for request in requests[num_decode:]:
            known = min(request.num_computed_tokens, request.num_tokens)
            state.kv.register(request, known, step_id)
        # whether a mask is needed for the last token that the row may sample
        reached = booking.num_output + drafts >= table.grammar_from[slots]
        constrained = table.has_grammar[slots] & booking.samples & reached
        plan = StepPlan(
            step_id=step_id,
            requests=requests,
            slots=slots.astype(np.int32),
            start=booking.start,
            num_new=n,
            samples=booking.samples,
            num_decode=num_decode,
            num_output=booking.num_output,
            new_requests=[r for r in dict.fromkeys(state.new) if r.slot >= 0],
            preempted=state.preempted,
            num_drafts=drafts,
            uncertain=booking.uncertain,
            epochs=table.epoch[slots],
            has_grammar=bool(constrained.any()),
            pending_grammar=bool((constrained & (booking.pending > 0)).any()),
        )
        state.new, state.preempted = [], []
        if state.connector is not None:
            plan.connector_meta = state.connector.build_step(plan)
        return plan

    # -- pause, reset, faults ---------------------------------------------------------------

    def has_work(self) -> bool:
        """Could `schedule` give a plan, now or later, as things stand (a pause included)?"""
        if self._pause == "keep":
            return False
        held = len(self.state.running) + len(self.state.loading)
        return held > 0 if self._pause else held + len(self.state.waiting) > 0

    def pause(self, mode: str = "wait") -> list[Request]:
        """abort: end all requests; wait: let running ones end, admit none; keep: stop at once.

        Returns the aborted requests. Raises ValueError for another mode.
        """
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"pause mode must be abort, wait or keep, got {mode!r}")
        self._pause = "keep" if mode == "keep" else "wait"
        return self.abort(None) if mode == "abort" else []

    def resume(self) -> None:
        self._pause = None

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached prefixes. Possible only while no block is owned, else False.

        reset_running: preempt the running requests for it. Their output in flight is dropped (and
        sampled again), so that no token depends on KV from before the reset.
        """
        state = self.state
        if reset_running and not state.loading:
            for request in reversed(state.running.copy()):  # the first comes back first
                preempt(state, request, drop=True)
            for request in state.waiting:
                request.drop_stale = request.num_stale_output_tokens > 0
        if state.kv.pool.num_free != self.config.num_blocks:
            return False
        if state.connector is not None and not state.connector.reset_cache():
            return False
        state.kv.clear_hashes()
        return True

    def on_fault(self, kv_lost: bool = True) -> list[Request]:
        """A step failed, and no plan in flight will be updated. Ends every request that holds
        device state or has output in flight (status aborted) and returns them; queued ones stay.

        kv_lost: the device's KV is gone, and the whole prefix cache with it; else only what the
        lost steps were to write is forgotten.
        """
        state = self.state
        hit = [r for r in state.requests.values() if r.slot >= 0 or r.num_in_flight_tokens > 0]
        if state.connector is not None:
            state.connector.on_fault()
        loading, state.loading = list(state.loading.values()), {}
        for request in loading:
            if request.is_finished:  # aborted before; it only waited for its load
                release(state, request)
        finish(state, [(request, ABORTED) for request in hit])
        for request in hit:
            request.num_stale_output_tokens, request.drop_stale = 0, False
        if kv_lost:
            state.kv.clear_hashes()
        else:
            state.kv.forget_uncertain()
        state.new, state.preempted = [], []
        self.num_processed_steps = self.num_scheduled_steps
        return hit

    # -- figures ----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self.state.running)

    @property
    def num_waiting(self) -> int:
        """Queued, or waiting for a load."""
        loading = sum(not request.is_finished for request in self.state.loading.values())
        return len(self.state.waiting) + loading

    @property
    def num_in_flight_steps(self) -> int:
        return self.num_scheduled_steps - self.num_processed_steps

    @property
    def num_preemptions(self) -> int:
        return self.state.num_preemptions

    @property
    def prefix_queries(self) -> int:
        """Tokens looked up in the prefix cache, once per admitted request."""
        return self.state.prefix.queries

    @property
    def prefix_hits(self) -> int:
        return self.state.prefix.hits

    @property
    def kv_usage(self) -> float:
        """Share of blocks that are owned, 0 to 1."""
        return 1.0 - self.state.kv.pool.num_free / self.config.num_blocks

    @property
    def block_tables(self) -> list[Int32]:
        """One [max_num_seqs, ceil(max_model_len / block_size)] table per KV group, by slot;
        the number `num_blocks` where there is no block."""
        return self.state.kv.block_tables

    def take_events(self) -> list[KVEvent]:
        """Prefix-cache events since the last call (none unless record_events)."""
        return self.state.kv.pool.take_events()

    def take_residency(self) -> dict[str, list[float]]:
        """Seconds that sampled blocks stayed, by kind, since the last call; see `residency`."""
        residency = self.state.kv.pool.residency
        return {} if residency is None else residency.take()

    def check_integrity(self) -> None:
        """Raises AssertionError that names what is broken."""
        check_integrity(self.state, self.num_in_flight_steps)


def _validate(config: SchedulerSizes) -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
        raise ValueError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} must be at least "
            f"max_model_len {config.max_model_len} when enable_chunked_prefill is off"
        )
    if not 0 <= config.watermark < 1:
        raise ValueError(f"watermark must be in [0, 1), got {config.watermark}")
    if not 0 <= config.residency_share <= 1:
        raise ValueError(f"residency_share must be in [0, 1], got {config.residency_share}")
    if not config.groups:
        raise ValueError("groups must name at least one KV group")
