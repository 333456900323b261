"""Which block leaves the host tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the ready slots of the host tier. Called under the tier's lock.

    Made as `Policy(num_slots)`. Everything is by slot; keys are given where a policy may remember
    them after the slot is gone.
    """

    def insert(self, slot: int, key: bytes) -> None:
        """The slot's contents became ready."""
        ...

    def touch(self, slot: int, promote: bool) -> None:
        """The slot was used. promote: by another request than the one that stored it."""
        ...

    def remove(self, slot: int) -> None:
        """The slot was discarded for another reason than `evict`."""
        ...

    def evict(self, count: int, may_go: Callable[[int], bool]) -> list[int] | None:
        """Exactly `count` slots to evict, all of which `may_go`; None, and nothing changed, when
        there are not so many. The slots are removed."""
        ...

    def will_store(self, keys: Iterable[bytes]) -> None:
        """These missing keys are about to be stored (adaptive policies learn from it)."""
        ...

    def clear(self) -> None: ...
