"""Events of the prefix cache, for routers that want to know which engine holds what.

Who publishes them, and in what form, is not the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockStored:
    """Blocks (a stretch of one chain) became findable."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    group_idx: int = 0
    medium: str = "GPU"


@dataclass(frozen=True)
class BlockRemoved:
    """No block with these hashes is left."""

    block_hashes: list[bytes]
    group_idx: int = 0
    medium: str = "GPU"


@dataclass(frozen=True)
class AllBlocksCleared:
    """The whole cache was forgotten."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Union:
    """The events of several pools as of one: what is gone from a pool is gone only when no other
    pool has it."""

    def __init__(self, pools: int) -> None:
        self._held: list[set[tuple[int, bytes]]] = [set() for _ in range(pools)]

    def take(self, pool: int, events: list[KVEvent]) -> list[KVEvent]:
        """What of a pool's events holds for all pools."""
        told: list[KVEvent] = []
        held = self._held[pool]
        for event in events:
            if isinstance(event, BlockStored):
                held.update((event.group_idx, one) for one in event.block_hashes)
                told.append(event)
            elif isinstance(event, BlockRemoved):
                gone = [(event.group_idx, one) for one in event.block_hashes]
                held.difference_update(gone)
                told += self._removed(gone)
            else:
                gone, self._held[pool] = list(held), set()
                held = self._held[pool]
                told += self._removed(gone) if any(self._held) else [event]
        return told

    def _removed(self, gone: list[tuple[int, bytes]]) -> list[KVEvent]:
        by_group: dict[int, list[bytes]] = {}
        for group, one in gone:
            if not any((group, one) in held for held in self._held):
                by_group.setdefault(group, []).append(one)
        return [BlockRemoved(hashes, group) for group, hashes in by_group.items()]
