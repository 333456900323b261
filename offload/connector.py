"""The scheduler's side of offload: which blocks are stored, which are loaded, and when.

When a store may read its block: at `build_step` of step s everything that steps before s compute
has been submitted, so the device runs the store's gather behind it and, as the gather is
dispatched before step s, ahead of whatever overwrites the block. Blocks whose tokens are not all
known and accepted wait: their hash would name something else.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxengine.offload.config import OffloadConfig, OffloadPolicy
from jaxengine.offload.jobs import Done, Job, OffloadStep
from jaxengine.offload.keys import OffloadKey, group_suffix
from jaxengine.offload.manager import OffloadManager, Search
from jaxengine.offload.prefix import loadable_blocks, needed_blocks, reach_of
from jaxengine.offload.tiers.host import State
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.connector import LoadResult
from jaxengine.sched.kv_cache import KVCache
from jaxengine.sched.plan import StepPlan
from jaxengine.sched.request import Request, RequestStatus

log = logging.getLogger(__name__)

JOB_BLOCKS = 64  # most blocks of one job
STEP_LOAD_BLOCKS = 128  # most blocks loaded in one step: who decodes beside it waits that long


@dataclass
class _Load:
    """A request's load: all jobs must succeed."""

    request: Request
    first: int  # block
    num_tokens: int
    jobs: int = 0
    failed: bool = False


@dataclass
class _Job:
    """A job that was made and has not ended."""

    slots: list[int]
    keys: list[OffloadKey]
    load: _Load | None = None


@dataclass
class _Tracked:
    """What is remembered about a request besides its cursor."""

    search: Search | None = None
    deadline: float = 0.0  # of the clock; after it nothing is waited for
    own: set[OffloadKey] = field(default_factory=set)  # stored by this request
    keys: list[list[OffloadKey]] = field(default_factory=list)  # [full blocks][group]


class OffloadingConnector:
    """A `KVConnector` over an `OffloadManager`. One thread calls it."""

    def __init__(
        self,
        config: OffloadConfig,
        sched_sizes: SchedulerSizes,
        manager: OffloadManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, for timeouts; a simulation has its own."""
        self._clock = clock
        self.config = config
        self.manager = manager
        self._size = sched_sizes.block_size
        self._reaches = [
            reach_of(group.window, sched_sizes.block_size) for group in sched_sizes.groups
        ]
        self._suffixes = [group_suffix(group) for group in range(len(sched_sizes.groups))]
        self._cursor = np.zeros(sched_sizes.max_num_seqs, np.int64)  # blocks considered, by slot
        self._tracked: weakref.WeakKeyDictionary[Request, _Tracked] = weakref.WeakKeyDictionary()
        self._ids = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._new_stores: list[Job] = []  # not yet given to the device
        self._new_loads: deque[Job] = deque()
        self._loading: dict[OffloadKey, int] = {}  # keys on their way to the device
        self._finished: list[LoadResult] = []
        self._failed: list[str] = []
        self._device_lost = False
        self._kv: KVCache | None = None

    def bind(self, kv: KVCache) -> None:
        """The scheduler's cache; called once, before the first request."""
        self._kv = kv

    # -- KVConnector ------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Nothing: what is on the device already is known when it is its turn."""

    def matched_tokens(self, request: Request, num_local: int) -> int | None:
        if not self.config.loads:
            return 0
        first = num_local // self._size
        keys = self._all_keys(request)
        limit = min(len(keys), (request.num_tokens - 1) // self._size)
        if limit <= first:
            return 0
        tracked = self._track(request)
        if self._loading and any(key in self._loading for row in keys[first:limit] for key in row):
            return None if self._may_wait(tracked) else 0  # soon they are hits on the device
        states = self._states(keys, first, limit)
        ready = self._prefix(states, first, limit, State.HIT)
        if self._prefix(states, first, limit, State.PENDING) > ready and self._may_wait(tracked):
            return None
        if self.manager.tiers and ready < limit:
            if not self._tiers_are_done(tracked, keys, states, first, limit):
                return None
            ready = self._prefix(self._states(keys, first, limit), first, limit, State.HIT)
        return (ready - first) * self._size

    def after_alloc(
        self, request: Request, block_ids: list[list[int]], num_local: int, num_external: int
    ) -> None:
        first, last = num_local // self._size, (num_local + num_external) // self._size
        self._cursor[request.slot] = last
        tracked = self._track(request)
        tracked.search, tracked.deadline = None, 0.0
        counters = self.manager.counters
        counters.add("external_queries", request.num_tokens - num_local)
        if not num_external:
            return
        load = _Load(request, first, (last - first) * self._size)
        keys = self._all_keys(request)
        wanted = needed_blocks(self._reaches, first, last)
        pinned: list[tuple[int, list[int], list[int], list[OffloadKey]]] = []
        for group, blocks in enumerate(wanted):
            for part in itertools.batched(blocks, JOB_BLOCKS):
                names = [keys[i][group] for i in part]
                slots = self.manager.prepare_load(names)
                if slots is None:
                    # Fewer blocks were given than matched, and a window's are not there.
                    for entry in pinned:
                        self.manager.complete_load(entry[2])
                    counters.add("load_misses")
                    self._cursor[request.slot] = first
                    self._finished.append(LoadResult(request.request_id, 0))
                    return
                pinned.append((group, [block_ids[group][i] for i in part], slots, names))
        for group, targets, slots, names in pinned:
            job = Job(next(self._ids), "load", group, targets, slots)
            self._jobs[job.job_id] = _Job(slots, names, load)
            load.jobs += 1
            self._new_loads.append(job)
            for key in names:
                self._loading[key] = self._loading.get(key, 0) + 1
        counters.add("host_hits", sum(len(names) for _, _, _, names in pinned))

    def build_step(self, plan: StepPlan) -> OffloadStep | None:
        """The transfers to dispatch before the plan's forward pass: stores of a block's old
        contents come before what overwrites them, so that new owners need no fence."""
        if self.config.stores and self.config.policy is OffloadPolicy.BLOCK_LEVEL:
            self._store_computed(plan)
        return self.take_step()

    def take_step(self) -> OffloadStep | None:
        """Transfers that wait to be dispatched, or None. Also for the engine to call when there
        is no plan: a load must start although no request can run."""
        stores, self._new_stores = self._new_stores, []
        loads: list[Job] = []
        blocks = 0
        while self._new_loads:
            blocks += len(self._new_loads[0].slots)  # a job is smaller than a step's share
            if blocks > STEP_LOAD_BLOCKS:
                break
            loads.append(self._new_loads.popleft())
        return OffloadStep(stores, loads) if stores or loads else None

    def take_finished_loads(self) -> list[LoadResult]:
        self._device_lost = False
        self.manager.poll()
        finished, self._finished = self._finished, []
        return finished

    def request_finished(self, request: Request, block_ids: list[list[int]]) -> None:
        own = self._track(request).own
        if request.status is RequestStatus.FINISHED_ERROR:
            # Its KV may hold NaN, and its blocks may have been stored before that was known.
            self.manager.discard(list(own))
            return
        if self._device_lost:
            return
        keys = self._all_keys(request)
        last = self._certain_blocks(request, keys)
        if self.config.stores:
            # At the request's level everything is offered, what was a hit too.
            level = self.config.policy is OffloadPolicy.BLOCK_LEVEL
            first = int(self._cursor[request.slot]) if level else 0
            self._offer(keys, block_ids, first, last, own)
        order = itertools.chain.from_iterable(reversed(keys[:last]))
        self.manager.touch(order, own)

    def reset_cache(self) -> bool:
        """Forget host memory. Stores in flight end in slots that nobody will find."""
        self.manager.reset()
        return True

    def on_fault(self) -> None:
        """Forget every transfer in flight. The device side must be reset (or dead) by now: it
        may no longer write into host slots."""
        for job in self._jobs.values():
            if job.load is not None:
                self.manager.complete_load(job.slots)
            else:
                self.manager.complete_store(job.slots, False)
        self.manager.counters.add("transfers_lost", len(self._jobs))
        self._jobs.clear()
        self._new_stores.clear()
        self._new_loads.clear()
        self._loading.clear()
        self._finished.clear()
        self._failed.clear()
        self._device_lost = True

    # -- the engine -------------------------------------------------------------------------

    def on_transfers(self, done: list[Done]) -> None:
        """Jobs that ended on the device side. Unknown ones (from before a fault) are ignored."""
        counters = self.manager.counters
        for end in done:
            job = self._jobs.pop(end.job_id, None)
            if job is None:
                counters.add("stale_transfers")
                continue
            kind = "store" if job.load is None else "load"
            counters.add(f"{kind}_bytes", end.bytes)
            counters.add(f"{kind}_seconds", end.seconds)
            counters.add(f"{kind}_jobs")
            if not end.ok:
                log.error("KV %s of %d blocks failed: %s", kind, len(job.slots), end.error)
                counters.add(f"{kind}_errors")
            if job.load is None:
                self.manager.complete_store(job.slots, end.ok)
            else:
                self._load_ended(job, job.load, end.ok)

    def take_failed(self) -> list[str]:
        """Requests to end with an error, because their load failed and the policy says so."""
        failed, self._failed = self._failed, []
        return failed

    def poll(self) -> None:
        """Take in what the tiers answered. `take_finished_loads` does it too; for an engine that
        has nothing to schedule."""
        self.manager.poll()

    def has_pending(self) -> bool:
        """Something is under way that an idle engine must keep stepping and polling for."""
        return bool(
            self._jobs or self._new_stores or self._new_loads or self._finished or self._failed
        ) or (self.manager.num_pending > 0)

    def stats(self) -> dict[str, float]:
        """Figures by name, see docs/offload.md."""
        figures = self.manager.stats()
        figures["jobs_in_flight"] = len(self._jobs)
        return figures

    def close(self) -> None:
        """Let the tiers finish what they were given, within seconds."""
        self.manager.poll()
        self.manager.close()

    # -- parts ------------------------------------------------------------------------------

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request)
        if tracked is None:
            tracked = self._tracked[request] = _Tracked()
        return tracked

    def _may_wait(self, tracked: _Tracked) -> bool:
        """Whether the request may ask again; it never waits longer than lookup_timeout."""
        now = self._clock()
        if not tracked.deadline:
            tracked.deadline = now + self.config.lookup_timeout
        if now < tracked.deadline:
            return True
        self.manager.counters.add("lookup_timeouts")
        return False

    def _all_keys(self, request: Request) -> list[list[OffloadKey]]:
        """[full blocks][group] names of the blocks of all known tokens."""
        assert self._kv is not None, "the connector was not bound to the scheduler's cache"
        keys, hashes = self._track(request).keys, self._kv.hash_blocks(request)
        for block_hash in hashes[len(keys) :]:
            keys.append([block_hash + suffix for suffix in self._suffixes])
        return keys

    def _states(self, keys: list[list[OffloadKey]], first: int, limit: int) -> list[list[State]]:
        """[limit][group]; what is on the device already counts as there."""
        lookup = self.manager.lookup
        here = [State.HIT] * len(self._reaches)
        return [here] * first + [[lookup(key) for key in row] for row in keys[first:limit]]

    def _prefix(self, states: list[list[State]], first: int, limit: int, least: State) -> int:
        return loadable_blocks(
            self._reaches, first, limit, lambda group, i: states[i][group] >= least
        )

    def _tiers_are_done(
        self,
        tracked: _Tracked,
        keys: list[list[OffloadKey]],
        states: list[list[State]],
        first: int,
        limit: int,
    ) -> bool:
        """Whether the tiers below have given what they can. One round for each time the request
        starts."""
        search = tracked.search
        if search is None:
            missing = [
                key
                for row, state in zip(keys[first:limit], states[first:limit], strict=True)
                for key, known in zip(row, state, strict=True)
                if known is State.MISS
            ]
            search = tracked.search = self.manager.search(missing, self._reaches == [None])
        if search.stage == "asked":
            found = search.found
            last = loadable_blocks(
                self._reaches,
                first,
                limit,
                lambda group, i: states[i][group] is State.HIT or keys[i][group] in found,
            )
            wanted = needed_blocks(self._reaches, first, last)
            order = sorted((i, group) for group, blocks in enumerate(wanted) for i in blocks)
            self.manager.fetch(search, [keys[i][group] for i, group in order])
        return search.stage == "done" or not self._may_wait(tracked)

    def _store_computed(self, plan: StepPlan) -> None:
        """Offer the blocks that steps before this plan filled."""
        assert self._kv is not None
        table, slots = self._kv.table, plan.slots
        booked = plan.samples * (1 + plan.num_drafts)
        certain = np.minimum(
            plan.start - (table.placeholders[slots] - booked), table.num_tokens[slots]
        )
        full = certain // self._size
        for row in np.flatnonzero(full > self._cursor[slots]).tolist():
            request = plan.requests[row]
            keys = self._all_keys(request)
            last = self._prompt_limit(request, min(int(full[row]), len(keys)))
            first = int(self._cursor[request.slot])
            blocks = self._kv.row_blocks(request.slot)
            own = self._track(request).own
            self._cursor[request.slot] = self._offer(keys, blocks, first, last, own)

    def _certain_blocks(self, request: Request, keys: list[list[OffloadKey]]) -> int:
        """Blocks whose tokens are known and whose KV has been dispatched, as of now."""
        fed = request.num_computed_tokens - request.num_output_placeholders
        full = min(fed, request.num_tokens) // self._size
        return self._prompt_limit(request, min(full, len(keys)))

    def _prompt_limit(self, request: Request, blocks: int) -> int:
        if not self.config.offload_prompt_only:
            return blocks
        return min(blocks, request.num_prompt_tokens // self._size)

    def _offer(
        self,
        keys: list[list[OffloadKey]],
        block_ids: list[list[int]],
        first: int,
        last: int,
        own: set[OffloadKey],
    ) -> int:
        """Make store jobs for blocks first .. last. Returns the block to go on with: less than
        `last` when there was no room."""
        assert self._kv is not None
        null = self._kv.pool.null
        step = min(JOB_BLOCKS, max(1, self.manager.host.pool.num_slots // 2))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            for group, row in enumerate(block_ids):
                owned = {keys[i][group]: row[i] for i in range(begin, end) if row[i] != null}
                if not owned:
                    continue
                reserved = self.manager.prepare_store(list(owned))
                if reserved is None:
                    return begin
                if reserved.keys:
                    blocks = [owned[key] for key in reserved.keys]
                    job = Job(next(self._ids), "store", group, blocks, reserved.slots)
                    self._jobs[job.job_id] = _Job(reserved.slots, reserved.keys)
                    self._new_stores.append(job)
                    own.update(reserved.keys)
        return max(first, last)

    def _load_ended(self, job: _Job, load: _Load, ok: bool) -> None:
        self.manager.complete_load(job.slots)
        for key in job.keys:
            count = self._loading.pop(key) - 1
            if count:
                self._loading[key] = count
        if not ok:
            load.failed = True
            self.manager.host.discard(job.keys)  # else the same failure comes again
        load.jobs -= 1
        if load.jobs == 0:
            if load.failed:
                self.manager.counters.add("load_failures")
                self._cursor[load.request.slot] = load.first  # what is computed now is stored
                if self.config.load_failure_policy == "fail":
                    self._failed.append(load.request.request_id)
            num_tokens = 0 if load.failed else load.num_tokens
            self.manager.counters.add("external_hits", num_tokens)
            self._finished.append(LoadResult(load.request.request_id, num_tokens))
