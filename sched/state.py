"""Everything the scheduler remembers, and the moves a request makes between its places.

A request is in exactly one place: `waiting`, `running` or `loading`, until it ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.connector import KVConnector
from jaxengine.sched.kv_cache import KVCache, PrefixHit
from jaxengine.sched.queue import WaitingQueue
from jaxengine.sched.request import Request, RequestStatus
from jaxengine.sched.slots import Index, SlotTable
from jaxengine.sched.updates import Finish


@dataclass
class PrefixStats:
    """Prefix-cache look-ups in tokens, counted once per admission; resumed requests apart."""

    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


@dataclass
class SchedulerState:
    config: SchedulerSizes
    table: SlotTable
    kv: KVCache
    waiting: WaitingQueue
    connector: KVConnector | None = None
    requests: dict[str, Request] = field(default_factory=dict)  # all that have not ended
    running: list[Request] = field(default_factory=list)  # in order of admission
    loading: dict[str, Request] = field(default_factory=dict)  # own blocks, wait for the connector
    new: list[Request] = field(default_factory=list)  # got a slot since the last plan
    preempted: list[Request] = field(default_factory=list)  # since the last plan
    num_preemptions: int = 0
    prefix: PrefixStats = field(default_factory=PrefixStats)
    order: Index | None = None  # slots of `running`; None = out of date
    cohort: int = 0  # whose turn it is; see SchedulerSizes.num_cohorts

    def running_slots(self) -> Index:
        if self.order is None:
            self.order = np.array([request.slot for request in self.running], np.intp)
        return self.order

    def contended(self) -> bool:
        """More than one request could use the step's tokens."""
        return len(self.running) + len(self.waiting) > 1


def cohort_is_full(state: SchedulerState) -> bool:
    """The cohort whose turn it is has its share of all requests."""
    if state.config.num_cohorts == 1:
        return False
    members = np.count_nonzero(state.table.cohort[state.running_slots()] == state.cohort)
    total = len(state.running) + len(state.waiting)
    return int(members) >= -(-total // state.config.num_cohorts)


def start(state: SchedulerState, request: Request, hit: PrefixHit, num_tokens: int) -> int:
    """Give a slot, the blocks of `hit`, and blocks for `num_tokens` tokens. Returns the slot."""
    slot = state.table.attach(request, request.stop_length)
    state.kv.admit(slot, hit, num_tokens)
    local = hit.num_blocks * state.config.block_size
    state.table.num_computed[slot] = local
    queries = request.num_tokens if state.config.enable_prefix_caching else 0
    if request.num_preemptions:
        state.prefix.preempted_queries += queries
        state.prefix.preempted_hits += local
    else:
        state.prefix.queries += queries
        state.prefix.hits += local
        request.num_cached_tokens = local
        request.first_scheduled_time = time.monotonic()
    return slot


def run(state: SchedulerState, request: Request) -> None:
    """A request that owns slot and blocks joins the running ones."""
    request.status = RequestStatus.RUNNING
    state.table.cohort[request.slot] = state.cohort
    state.running.append(request)
    state.new.append(request)
    state.order = None


def release(state: SchedulerState, request: Request, *, forget: bool = False) -> None:
    """Take slot and blocks. Steps in flight may still use them: the device works in order, so
    whoever gets them next comes after."""
    state.kv.free(request.slot, forget=forget)
    state.table.detach(request)
    state.order = None


def preempt(state: SchedulerState, request: Request, *, drop: bool = False) -> None:
    """Take slot and blocks; the request starts over from the front of the queue.

    What it has in flight becomes stale: delivered once when it comes (it was sampled from a
    correct state), or ignored with `drop`, which lasts until the last such token is drained.
    """
    request.num_stale_output_tokens += int(state.table.in_flight[request.slot])
    request.drop_stale = request.num_stale_output_tokens > 0 and (drop or request.drop_stale)
    state.table.num_scheduled[request.slot] = 0
    release(state, request)
    request.reset_computed()
    request.status = RequestStatus.PREEMPTED
    request.num_preemptions += 1
    request.spec_token_ids = []
    state.running.remove(request)
    state.waiting.prepend(request)
    state.preempted.append(request)
    state.num_preemptions += 1


def finish(state: SchedulerState, ends: list[tuple[Request, Finish]]) -> None:
    """End these requests, wherever they are."""
    queued: set[Request] = set()
    for request, end in ends:
        del state.requests[request.request_id]
        request.status = end.status  # before the connector is told: an error's KV is not kept
        if request.slot < 0:
            queued.add(request)
        elif request.request_id not in state.loading:  # a load still writes into its blocks
            if state.connector is not None:
                state.connector.request_finished(request, state.kv.row_blocks(request.slot))
            # An error may mean NaN in the KV: nobody shall find those blocks.
            release(state, request, forget=end.status is RequestStatus.FINISHED_ERROR)
        request.finish_reason, request.stop_reason = end.finish_reason, end.stop_reason
    if queued:
        state.waiting.remove(queued)
    if len(queued) < len(ends):
        state.running = [request for request in state.running if request.slot >= 0]
