"""Doubly linked lists of slots in flat arrays: 8 bytes a slot, whatever the number of lists."""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class SlotLists:
    """`num_lists` lists over slots 0 .. num_slots-1; a slot is in one list or in none.

    Ends are kept at indices behind the slots: list i's sentinel is num_slots + i. The front is
    the least recently used.
    """

    def __init__(self, num_slots: int, num_lists: int) -> None:
        self.num_slots = num_slots
        self.num_lists = num_lists
        self.clear()

    def clear(self) -> None:
        total = self.num_slots + self.num_lists
        self._next = array("i", [-1]) * total
        self._prev = array("i", [-1]) * total
        for end in range(self.num_slots, total):
            self._next[end] = self._prev[end] = end
        self.length = [0] * self.num_lists
        self._list = bytearray(b"\xff") * self.num_slots

    def where(self, slot: int) -> int:
        """The list that the slot is in, or 255."""
        return self._list[slot]

    def append(self, which: int, slot: int) -> None:
        """To the most recently used end."""
        end = self.num_slots + which
        last = self._prev[end]
        self._next[last] = slot
        self._prev[slot], self._next[slot] = last, end
        self._prev[end] = slot
        self._list[slot] = which
        self.length[which] += 1

    def remove(self, slot: int) -> None:
        before, after = self._prev[slot], self._next[slot]
        self._next[before], self._prev[after] = after, before
        self.length[self._list[slot]] -= 1
        self._list[slot] = 255

    def walk(self, which: int) -> Iterator[int]:
        """From the least recently used on. The list must not change meanwhile."""
        end = self.num_slots + which
        slot = self._next[end]
        while slot != end:
            yield slot
            slot = self._next[slot]
