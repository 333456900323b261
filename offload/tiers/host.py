"""The host tier: which blocks are in the pool's slots, and who may touch them.

A slot is free, being written, ready (indexed under its key), or doomed: out of the index while
somebody still reads or writes it, free as soon as they stop.
"""

from __future__ import annotations

import enum
import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.keys import OffloadKey
from jaxengine.offload.policies.base import EvictionPolicy

WRITING = -1


class State(enum.IntEnum):
    MISS = 0
    PENDING = 1  # present, its bytes are still on the way
    HIT = 2


class Reserved(NamedTuple):
    """Slots to write: `slots[i]` will hold `keys[i]`."""

    keys: list[OffloadKey]
    slots: list[int]
    evicted: list[OffloadKey]


class HostTier:
    """Thread-safe; every call holds one lock for as long as a few dictionary accesses take."""

    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self.pool = pool
        self._policy = policy
        self._index: dict[OffloadKey, int] = {}
        self._key: list[OffloadKey | None] = [None] * pool.num_slots  # None: free or doomed
        self._ref = array("i", [0]) * pool.num_slots  # readers, or WRITING
        self._fresh = 0  # slots from here on were never used
        self._free: list[int] = []
        self._num_evictable = 0
        self._lock = threading.Lock()

    # -- looking ----------------------------------------------------------------------------

    def lookup(self, key: OffloadKey) -> State:
        slot = self._index.get(key, -1)
        if slot < 0:
            return State.MISS
        return State.PENDING if self._ref[slot] == WRITING else State.HIT

    def lookup_all(self, keys: Iterable[OffloadKey]) -> list[State]:
        lookup = self.lookup
        with self._lock:
            return [lookup(key) for key in keys]

    # -- reading ----------------------------------------------------------------------------

    def pin(self, keys: Sequence[OffloadKey]) -> list[int] | None:
        """Slots of these keys, kept until `unpin`; None, and nothing pinned, unless all are
        ready."""
        with self._lock:
            slots = [self._index.get(key, -1) for key in keys]
            if any(slot < 0 or self._ref[slot] == WRITING for slot in slots):
                return None
            for slot in slots:
                self._num_evictable -= self._ref[slot] == 0
                self._ref[slot] += 1
            return slots

    def unpin(self, slots: Iterable[int]) -> None:
        with self._lock:
            for slot in slots:
                self._ref[slot] -= 1
                if self._ref[slot] == 0:
                    self._released(slot)

    # -- writing ----------------------------------------------------------------------------

    def reserve(self, keys: Sequence[OffloadKey]) -> Reserved | None:
        """Slots for those keys that are missing, evicting others; none of `keys` is evicted.
        None, and nothing changed, when there is no room for all."""
        with self._lock:
            index = self._index
            missing = [key for key in dict.fromkeys(keys) if key not in index]
            evicted: list[OffloadKey] = []
            room = len(self._free) + self.pool.num_slots - self._fresh
            short = len(missing) - room
            if short > self._num_evictable:
                return None  # the usual refusal must be cheap
            self._policy.will_store(missing)
            if short > 0:
                victims = self._choose_victims(short, keys)
                if victims is None:
                    return None
                for slot in victims:
                    key = self._key[slot]
                    assert key is not None
                    evicted.append(key)
                    self._forget(key, slot)
                    self._free.append(slot)
                self._num_evictable -= short
            slots = [self._take_free() for _ in missing]
            for key, slot in zip(missing, slots, strict=True):
                index[key] = slot
                self._key[slot] = key
                self._ref[slot] = WRITING
            return Reserved(missing, slots, evicted)

    def commit(self, slots: Iterable[int], ok: bool) -> list[tuple[OffloadKey, int]]:
        """Reserved slots were written, or will never be. Returns (key, slot) that are ready."""
        ready: list[tuple[OffloadKey, int]] = []
        with self._lock:
            for slot in slots:
                key = self._key[slot]
                self._ref[slot] = 0
                if key is None:  # doomed meanwhile
                    self._free.append(slot)
                elif ok:
                    self._policy.insert(slot, key)
                    self._num_evictable += 1
                    ready.append((key, slot))
                else:
                    self._forget(key, slot)
                    self._free.append(slot)
        return ready

    # -- order and removal ------------------------------------------------------------------

    def touch(self, keys: Iterable[OffloadKey], own: Iterable[OffloadKey] = ()) -> None:
        """Mark as used, in this order; pass the head of a sequence last. own: those that the
        toucher stored itself."""
        own = set(own)
        with self._lock:
            for key in keys:
                slot = self._index.get(key, -1)
                if slot >= 0 and self._ref[slot] != WRITING:
                    self._policy.touch(slot, key not in own)

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Forget these keys, pinned or not."""
        with self._lock:
            for key in keys:
                slot = self._index.get(key, -1)
                if slot >= 0:
                    self._drop(key, slot)

    def clear(self) -> None:
        """Forget all. Slots in use are free when their users are done."""
        with self._lock:
            for key, slot in list(self._index.items()):
                self._drop(key, slot)
            self._policy.clear()

    # -- figures ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._index)

    @property
    def usage(self) -> float:
        """Share of the slots in use, 0 to 1."""
        return 1 - (len(self._free) + self.pool.num_slots - self._fresh) / self.pool.num_slots

    def check(self) -> None:
        """Raises AssertionError when the books disagree."""
        with self._lock:
            for key, slot in self._index.items():
                assert self._key[slot] == key, f"slot {slot} is indexed under another key"
            named = sum(key is not None for key in self._key)
            assert named == len(self._index), "a slot has a key that is not indexed"
            free = set(self._free)
            assert len(free) == len(self._free), "a slot is free twice"
            assert all(self._key[slot] is None for slot in free), "a free slot has a key"
            ready = sum(self._ref[slot] == 0 for slot in self._index.values())
            assert ready == self._num_evictable, "the count of evictable slots is wrong"

    @property
    def num_busy(self) -> int:
        """Slots that somebody reads or writes."""
        with self._lock:
            return sum(ref != 0 for ref in self._ref)

    # -- inside the lock --------------------------------------------------------------------

    def _choose_victims(self, count: int, offered: Sequence[OffloadKey]) -> list[int] | None:
        ref = self._ref
        kept = {self._index[key] for key in offered if key in self._index}
        return self._policy.evict(count, lambda slot: ref[slot] == 0 and slot not in kept)

    def _take_free(self) -> int:
        if self._free:
            return self._free.pop()
        self._fresh += 1
        return self._fresh - 1

    def _released(self, slot: int) -> None:
        if self._key[slot] is None:
            self._free.append(slot)
        else:
            self._num_evictable += 1

    def _forget(self, key: OffloadKey, slot: int) -> None:
        del self._index[key]
        self._key[slot] = None

    def _drop(self, key: OffloadKey, slot: int) -> None:
        self._forget(key, slot)
        ref = self._ref[slot]
        if ref != WRITING:
            self._policy.remove(slot)
        if ref == 0:
            self._num_evictable -= 1
            self._free.append(slot)
