"""Adaptive replacement: recency and frequency, balanced by what turned out to be missed.

T1 holds blocks seen by one request, T2 those that another request came back to. B1 and B2 are
ghosts: keys lately evicted from T1 and T2. A miss on a ghost says which of the two was too small.
A scan only ever passes through T1, so it cannot push T2 out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from jaxengine.offload.policies.slot_list import SlotLists

T1, T2 = 0, 1


class ARCPolicy:
    """`target` is the wanted size of T1, in slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._lists = SlotLists(num_slots, 2)
        self._keys: list[bytes] = [b""] * num_slots
        # Ordered sets of hash(key), oldest first: half the size of the keys, and two keys of one
        # hash would only adapt the target once too often.
        self._ghosts: tuple[dict[int, None], dict[int, None]] = ({}, {})
        self.target = 0.0

    def insert(self, slot: int, key: bytes) -> None:
        self._keys[slot] = key
        self._lists.append(T1, slot)
        for ghosts in self._ghosts:
            ghosts.pop(hash(key), None)

    def touch(self, slot: int, promote: bool) -> None:
        which = T2 if promote else self._lists.where(slot)
        self._lists.remove(slot)
        self._lists.append(which, slot)

    def remove(self, slot: int) -> None:
        self._lists.remove(slot)
        self._keys[slot] = b""

    def will_store(self, keys: Iterable[bytes]) -> None:
        """Adapt, at most once for a batch and kind: one long conversation is one observation."""
        b1, b2 = self._ghosts
        in_b1 = in_b2 = False
        for key in keys:
            in_b1 = in_b1 or hash(key) in b1
            in_b2 = in_b2 or hash(key) in b2
        if in_b1:
            step = max(1.0, len(b2) / max(1, len(b1)))
            self.target = min(float(self.num_slots), self.target + step)
        if in_b2:
            step = max(1.0, len(b1) / max(1, len(b2)))
            self.target = max(0.0, self.target - step)

    def evict(self, count: int, may_go: Callable[[int], bool]) -> list[int] | None:
        walks = [filter(may_go, self._lists.walk(which)) for which in (T1, T2)]
        victims: list[tuple[int, int]] = []
        left_in_t1 = self._lists.length[T1]
        for _ in range(count):
            order = (T1, T2) if left_in_t1 and left_in_t1 >= int(self.target) else (T2, T1)
            for which in order:
                slot = next(walks[which], None)
                if slot is not None:
                    victims.append((which, slot))
                    left_in_t1 -= which == T1
                    break
            else:
                return None
        for which, slot in victims:
            self._lists.remove(slot)
            self._ghosts[which][hash(self._keys[slot])] = None
            self._keys[slot] = b""
        for ghosts in self._ghosts:
            _trim(ghosts, self.num_slots // 2)
        return [slot for _, slot in victims]

    def clear(self) -> None:
        self._lists.clear()
        self._keys = [b""] * self.num_slots
        self._ghosts = ({}, {})
        self.target = 0.0


def _trim(ghosts: dict[int, None], limit: int) -> None:
    """Forget the oldest. In batches: taking a dict's first entry costs as much as was deleted
    before it."""
    excess = len(ghosts) - limit
    if excess > limit // 16:
        for key in list(islice(ghosts, excess)):
            del ghosts[key]
