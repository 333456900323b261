"""The manager: where each block is, and the traffic between host memory and what is behind it.

    device  <->  host slots  <->  disk, object store, other engines

Everything passes through host memory. The calls return at once; `poll` takes in what the tiers'
threads have answered. One thread calls the manager (its host tier may be read from others).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxengine.offload.counters import Counters
from jaxengine.offload.keys import OffloadKey, group_of
from jaxengine.offload.tiers.host import HostTier, Reserved, State
from jaxengine.offload.tiers.worker import BATCH, TierResult, TierWorker

MAX_DOOMED = 65_536  # deletes that may wait for one tier


@dataclass
class Search:
    """One request's look into the tiers below: ask each in turn, then fetch once. Never asked
    again, so that a block which looks present but cannot be read is tried once and no more."""

    keys: list[OffloadKey]  # not in host memory when it began
    in_order: bool  # a key is of no use without those before it
    stage: Literal["asking", "asked", "fetching", "done"] = "asking"
    found: dict[OffloadKey, int] = field(default_factory=dict)  # index of the tier
    tier: int = -1
    outstanding: int = 0


class OffloadManager:
    """Protocol per block: lookup; prepare_load, complete_load; prepare_store, complete_store."""

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[TierWorker],
        page_bytes: Callable[[int], int],
        counters: Counters,
    ) -> None:
        """tiers: in the order in which they are asked. page_bytes: of a KV group's page."""
        self.host = host
        self.tiers = list(tiers)
        self.counters = counters
        self._page_bytes = page_bytes
        self._tokens = itertools.count()
        self._searches: dict[int, Search] = {}  # by task token
        self._reads: dict[int, tuple[Search, list[int]]] = {}  # slots that are filled
        self._writes: dict[int, int] = {}  # pinned slot
        self._writing: Counter[tuple[int, OffloadKey]] = Counter()  # by tier and key
        # To be deleted as soon as no write of the key is under way and the queue has room.
        self._doomed: list[dict[OffloadKey, None]] = [{} for _ in self.tiers]

    # -- the protocol -----------------------------------------------------------------------

    def lookup(self, key: OffloadKey) -> State:
        return self.host.lookup(key)

    def prepare_load(self, keys: Sequence[OffloadKey]) -> list[int] | None:
        """Slots of the keys, pinned until `complete_load`; None unless all are ready."""
        return self.host.pin(keys)

    def complete_load(self, slots: Sequence[int]) -> None:
        self.host.unpin(slots)

    def prepare_store(self, keys: Sequence[OffloadKey]) -> Reserved | None:
        """Slots for the keys that are missing, and which keys had to go for them; None when there
        is no room now."""
        reserved = self.host.reserve(keys)
        if reserved is None:
            self.counters.add("allocation_failures")
        else:
            self.counters.add("stores_skipped", len(set(keys)) - len(reserved.keys))
            self.counters.add("host_evictions", len(reserved.evicted))
        return reserved

    def complete_store(self, slots: Sequence[int], ok: bool) -> None:
        """The slots were written (or not). Written ones go on to every writable tier."""
        for key, slot in self.host.commit(slots, ok):
            for index, tier in enumerate(self.tiers):
                if tier.writable:
                    self._pass_on(index, key, slot)

    def touch(self, keys: Iterable[OffloadKey], own: Iterable[OffloadKey] = ()) -> None:
        self.host.touch(keys, own)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Their contents are wrong: forget them in every tier of ours."""
        if not keys:
            return
        self.host.discard(keys)
        for tier, doomed in zip(self.tiers, self._doomed, strict=True):
            if tier.writable:
                doomed.update(dict.fromkeys(keys))
                excess = max(0, len(doomed) - MAX_DOOMED)
                for key in list(itertools.islice(doomed, excess)):
                    del doomed[key]
                self.counters.add(f"{tier.name}_dropped_deletes", excess)
        self._delete_doomed()

    # -- the tiers below --------------------------------------------------------------------

    def search(self, keys: list[OffloadKey], in_order: bool) -> Search:
        """Begin to ask the tiers for keys that are not in host memory."""
        search = Search(keys, in_order)
        self._ask_next(search)
        return search

    def fetch(self, search: Search, keys: Iterable[OffloadKey]) -> None:
        """Bring these found keys into host memory; as many of the first ones as there is room."""
        search.stage = "fetching"
        wanted = [key for key in keys if key in search.found]
        reserved = self.host.reserve(wanted)
        while reserved is None and len(wanted) > 1:
            wanted = wanted[: len(wanted) // 2]
            reserved = self.host.reserve(wanted)
        if reserved is None:
            self.counters.add("promotion_allocation_failures")
        else:
            self.counters.add("host_evictions", len(reserved.evicted))
            self._read_all(search, reserved)
        if search.outstanding == 0:
            search.stage = "done"

    def poll(self) -> None:
        """Take in all answers. Called once a step."""
        for index, tier in enumerate(self.tiers):
            for result in tier.poll():
                if result.kind == "contains":
                    self._answered(result, index)
                elif result.kind == "read":
                    self._fetched(result, tier.name)
                elif result.kind == "write":
                    self._written(result, index)
        self._delete_doomed()

    @property
    def num_pending(self) -> int:
        """Tasks of the tiers' threads that were not yet taken in, and deletes that wait."""
        return sum(tier.pending for tier in self.tiers) + sum(map(len, self._doomed))

    def reset(self) -> None:
        """Forget what is in host memory. The tiers below keep theirs: a block's name says all
        that its bytes depend on."""
        self.host.clear()

    def stats(self) -> dict[str, float]:
        figures = self.counters.snapshot()
        figures["host_blocks"] = len(self.host)
        figures["host_usage"] = self.host.usage
        for tier in self.tiers:
            figures[f"{tier.name}_read_queue"], figures[f"{tier.name}_write_queue"] = tier.depths()
        return figures

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    # -- parts ------------------------------------------------------------------------------

    def _pass_on(self, index: int, key: OffloadKey, slot: int) -> None:
        pinned = self.host.pin([key])
        if pinned is None:  # discarded a moment ago
            return
        token = next(self._tokens)
        data = self.host.pool.view(slot, self._page_bytes(group_of(key)))
        if self.tiers[index].write(token, key, data):
            self._writes[token] = slot
            self._writing[index, key] += 1
        else:
            self.host.unpin(pinned)

    def _ask_next(self, search: Search) -> None:
        """Ask the next tier for what was not found; the last answer ends the asking."""
        rest = [key for key in search.keys if key not in search.found]
        while rest and search.tier + 1 < len(self.tiers):
            search.tier += 1
            token = next(self._tokens)
            if self.tiers[search.tier].ask(token, rest, search.in_order):
                self._searches[token] = search
                return
        search.stage = "asked"

    def _answered(self, result: TierResult, index: int) -> None:
        search = self._searches.pop(result.token)
        name = self.tiers[index].name
        self.counters.add(f"{name}_queries", len(result.keys))
        for key, present in zip(result.keys, result.ok, strict=True):
            if present:
                search.found[key] = index
        self._ask_next(search)

    def _read_all(self, search: Search, reserved: Reserved) -> None:
        by_tier: dict[int, list[tuple[OffloadKey, int]]] = {}
        for key, slot in zip(reserved.keys, reserved.slots, strict=True):
            by_tier.setdefault(search.found[key], []).append((key, slot))
        for index, pairs in by_tier.items():
            for batch in itertools.batched(pairs, BATCH):
                keys, slots = [key for key, _ in batch], [slot for _, slot in batch]
                pages = [
                    self.host.pool.view(slot, self._page_bytes(group_of(key)))
                    for key, slot in batch
                ]
                token = next(self._tokens)
                if self.tiers[index].read(token, keys, pages):
                    self._reads[token] = search, slots
                    search.outstanding += 1
                else:
                    self.host.commit(slots, False)

    def _fetched(self, result: TierResult, name: str) -> None:
        search, slots = self._reads.pop(result.token)
        for key, slot, ok in zip(result.keys, slots, result.ok, strict=True):
            self.host.commit([slot], ok)
            self.counters.add(f"{name}_hits" if ok else f"{name}_fetch_failures")
            if ok:
                self.counters.add(f"{name}_read_bytes", self._page_bytes(group_of(key)))
        search.outstanding -= 1
        if search.outstanding == 0:
            search.stage = "done"

    def _written(self, result: TierResult, index: int) -> None:
        name, key = self.tiers[index].name, result.keys[0]
        self.host.unpin([self._writes.pop(result.token)])
        self._writing[index, key] -= 1
        if not self._writing[index, key]:
            del self._writing[index, key]
        if result.ok[0]:
            self.counters.add(f"{name}_write_bytes", self._page_bytes(group_of(key)))
        else:
            self.counters.add(f"{name}_write_failures")

    def _delete_doomed(self) -> None:
        """Delete what may be deleted now. A write that is under way comes first: it would bring
        the block back."""
        for index, (tier, doomed) in enumerate(zip(self.tiers, self._doomed, strict=True)):
            keys = [key for key in doomed if (index, key) not in self._writing]
            if keys and tier.delete(keys):
                for key in keys:
                    del doomed[key]
