"""Blocks of host memory that are kept for peers who found them and will come to fetch them."""

from __future__ import annotations

from collections import Counter

from jaxengine.offload.counters import Counters
from jaxengine.offload.keys import OffloadKey
from jaxengine.offload.tiers.host import HostTier

MAX_LEASES = 262_144


class Leases:
    """One lease for each client and key. What is leased cannot be evicted, so at most half of the
    host slots ever are: the engine can always store. Whoever gets no lease may still fetch the
    block, if it is there by then. Used by one thread."""

    def __init__(self, host: HostTier, seconds: float, counters: Counters) -> None:
        self._host = host
        self._seconds = seconds
        self._counters = counters
        self._held: dict[tuple[bytes, OffloadKey], tuple[int, float]] = {}  # slot, end
        self._slots: Counter[int] = Counter()  # leases of a slot
        self._max_slots = host.pool.num_slots // 2

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, client: bytes, key: OffloadKey, now: float) -> None:
        """Begin the client's lease of this block, or prolong it."""
        end = now + self._seconds
        if (old := self._held.get((client, key))) is not None:
            self._held[client, key] = old[0], end
            return
        slots = self._host.pin([key])
        if slots is None:  # evicted a moment ago
            return
        [slot] = slots
        full = len(self._slots) >= self._max_slots and slot not in self._slots
        if full or len(self._held) >= MAX_LEASES:
            self._host.unpin(slots)
            self._counters.add("p2p_leases_denied")
            return
        self._held[client, key] = slot, end
        self._slots[slot] += 1

    def release(self, client: bytes, key: OffloadKey) -> None:
        """End the client's lease of this block, if there is one."""
        held = self._held.pop((client, key), None)
        if held is None:
            return
        slot = held[0]
        self._host.unpin([slot])
        self._slots[slot] -= 1
        if not self._slots[slot]:
            del self._slots[slot]

    def end(self, now: float) -> None:
        """End the leases whose time is up."""
        ended = [name for name, (_, end) in self._held.items() if end <= now]
        for name in ended:
            self.release(*name)
        if ended:
            self._counters.add("p2p_leases_expired", len(ended))

    def end_all(self) -> None:
        for name in list(self._held):
            self.release(*name)
