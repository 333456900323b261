"""Events of the prefix cache, for routers that want to know which engine holds what.

Only data and the replay buffer; who publishes them is not the planner's business.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Blocks (a stretch of one chain) became findable."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    group_idx: int = 0
    medium: str = "GPU"


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """No block with these hashes is left."""

    block_hashes: list[bytes]
    group_idx: int = 0
    medium: str = "GPU"


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """The whole cache was forgotten."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """What one step changed. `ts` is wall-clock seconds."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class ReplayBuffer:
    """The last `max_batches` batches, numbered from 0 without gaps."""

    def __init__(self, max_batches: int = 10_000, data_parallel_rank: int | None = None) -> None:
        self._batches: deque[tuple[int, EventBatch]] = deque(maxlen=max_batches)
        self._rank = data_parallel_rank
        self.next_sequence = 0

    def append(self, events: list[KVEvent]) -> tuple[int, EventBatch]:
        """Store the events of one step. Returns (sequence number, batch)."""
        batch = EventBatch(time.time(), events, self._rank)
        entry = (self.next_sequence, batch)
        self._batches.append(entry)
        self.next_sequence += 1
        return entry

    def since(self, sequence: int) -> list[tuple[int, EventBatch]]:
        """Batches from `sequence` on that are still held, oldest first."""
        return [entry for entry in self._batches if entry[0] >= sequence]
