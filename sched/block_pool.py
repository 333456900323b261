"""The pool of KV blocks: who owns each block, and which blocks may be found by their hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxengine.sched.kv_events import AllBlocksCleared, BlockRemoved, KVEvent
from jaxengine.sched.residency import Residency

HashKey = tuple[int, bytes]  # KV group, block hash


class BlockPool:
    """Blocks 0 .. num_blocks-1; `null` (= num_blocks) stands for "no block" in block tables.

    A block is owned (ref > 0) or free (in the free queue), never both. A free block keeps its hash
    until it is taken again, so it can still be hit. The head of the free queue is taken first.
    """

    def __init__(
        self, num_blocks: int, *, record_events: bool = False, residency_share: float = 0.0
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.null = num_blocks
        self.ref = [0] * num_blocks
        self.hash_of: list[HashKey | None] = [None] * num_blocks
        # Several blocks may hold the same contents: block tables are never rewritten.
        self._cached: dict[HashKey, int | list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.events: list[KVEvent] | None = [] if record_events else None
        self.residency = Residency(residency_share) if residency_share else None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Own `count` blocks and forget what they held. The caller has checked `num_free`."""
        free, ref, hash_of = self._free, self.ref, self.hash_of
        blocks = [free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            if self.residency is not None:
                self.residency.given(block, evicted=hash_of[block] is not None)
            if hash_of[block] is not None:
                self.unregister(block)
            ref[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block; free ones leave the free queue and keep their contents."""
        blocks = list(blocks)
        if self.residency is not None:
            self.residency.used(blocks)
        for block in blocks:
            if self.ref[block] == 0:
                del self._free[block]
            self.ref[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove an owner from each block. Pass a sequence's last block first.

        Blocks without a hash go to the front of the free queue (nobody can want them back), others
        to the back; so of one sequence the end is evicted before the beginning.
        """
        for block in blocks:
            self.ref[block] -= 1
            if self.ref[block] == 0:
                self._free[block] = None
                if self.hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free now (touching them would shrink the free queue)."""
        return sum(self.ref[block] == 0 for block in blocks)

    def lookup(self, group: int, block_hash: bytes) -> int | None:
        found = self._cached.get((group, block_hash))
        return found[0] if isinstance(found, list) else found

    def register(self, block: int, group: int, block_hash: bytes) -> None:
        """Let `block` be found by its hash."""
        key = (group, block_hash)
        self.hash_of[block] = key
        other = self._cached.setdefault(key, block)
        if other != block:
            self._cached[key] = [*other, block] if isinstance(other, list) else [other, block]

    def unregister(self, block: int) -> None:
        """Forget the block's contents; its owners keep it."""
        key = self.hash_of[block]
        if key is None:
            return
        self.hash_of[block] = None
        found = self._cached.pop(key)
        if isinstance(found, list):
            rest = [other for other in found if other != block]
            self._cached[key] = rest if len(rest) > 1 else rest[0]
        elif self.events is not None:
            self.events.append(BlockRemoved(block_hashes=[key[1]], group_idx=key[0]))

    def clear_hashes(self) -> None:
        """Forget the contents of every block, owned ones too."""
        self.hash_of = [None] * self.num_blocks
        self._cached.clear()
        if self.events is not None:
            self.events.append(AllBlocksCleared())

    def take_events(self) -> list[KVEvent]:
        """Events since the last call; empty when they are not recorded."""
        events, self.events = self.events or [], None if self.events is None else []
        return events

    def free_order(self) -> list[int]:
        """Free blocks, next to be taken first."""
        return list(self._free)

    def check(self, owners: Sequence[int]) -> None:
        """Raises AssertionError unless `owners[b]` people own block b and all books agree."""
        for block in range(self.num_blocks):
            ref = self.ref[block]
            assert ref == owners[block], f"block {block}: ref {ref}, owned {owners[block]} times"
            assert (ref == 0) == (block in self._free), f"block {block}: ref {ref} and free queue"
        named = {
            block: key
            for key, found in self._cached.items()
            for block in (found if isinstance(found, list) else [found])
        }
        hashed = {block: key for block, key in enumerate(self.hash_of) if key is not None}
        assert named == hashed, "hash map and blocks' hashes differ"
