"""Least recently used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from jaxengine.offload.policies.slot_list import SlotLists


class LRUPolicy:
    """Evicts from the old end, skipping what is pinned."""

    def __init__(self, num_slots: int) -> None:
        self._order = SlotLists(num_slots, 1)

    def insert(self, slot: int, key: bytes) -> None:
        self._order.append(0, slot)

    def touch(self, slot: int, promote: bool) -> None:
        self._order.remove(slot)
        self._order.append(0, slot)

    def remove(self, slot: int) -> None:
        self._order.remove(slot)

    def evict(self, count: int, may_go: Callable[[int], bool]) -> list[int] | None:
        victims = list(islice(filter(may_go, self._order.walk(0)), count))
        if len(victims) < count:
            return None
        for slot in victims:
            self._order.remove(slot)
        return victims

    def will_store(self, keys: Iterable[bytes]) -> None:
        """LRU learns nothing from what it lost."""

    def clear(self) -> None:
        self._order.clear()
