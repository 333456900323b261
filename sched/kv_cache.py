"""Block tables of the resident requests and the prefix cache over them.

All KV groups draw from one pool. Entry i of a group's table row is the block that holds tokens
i * block_size .. of the request, or `null` where a sliding window has passed; every group's row
has the same length, `table.num_blocks[slot]`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxengine.sched.block_pool import BlockPool
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.hashing import extend_hashes, hash_function, root_hash, salt_extra
from jaxengine.sched.kv_events import BlockStored
from jaxengine.sched.plan import Int32
from jaxengine.sched.request import Request
from jaxengine.sched.slots import Index, SlotTable


@dataclass(frozen=True)
class PrefixHit:
    """The first blocks of a request, found in the cache. blocks: [group][num_blocks]."""

    num_blocks: int
    blocks: list[list[int]]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class KVCache:
    """Gives blocks to slots, takes them back, finds and registers equal prefixes."""

    def __init__(self, config: SchedulerSizes, table: SlotTable, *, record_events: bool) -> None:
        self.config = config
        self.table = table
        self.pool = BlockPool(
            config.num_blocks, record_events=record_events, residency_share=config.residency_share
        )
        self.windows = [group.window for group in config.groups]
        self.has_windows = any(self.windows)
        width = ceil_div(config.max_model_len, config.block_size)
        shape = (config.max_num_seqs, width)
        self.block_tables: list[Int32] = [
            np.full(shape, self.pool.null, np.int32) for _ in self.windows
        ]
        # First entry of the row that is not yet released, per group and slot.
        self._window_start = [[0] * config.max_num_seqs for _ in self.windows]
        self._digest = hash_function(config.prefix_caching_hash_algo)
        self._root = root_hash(config.prefix_caching_hash_algo, config.hash_seed)
        # Blocks registered by steps whose result is not here: (step, blocks).
        self._uncertain: deque[tuple[int, list[int]]] = deque()

    # -- capacity ---------------------------------------------------------------------------

    def blocks_needed(self, num_tokens: int, chunk: int = 1) -> int:
        """Blocks, over all groups, to feed `num_tokens` tokens with at most `chunk` a step."""
        size = self.config.block_size
        whole = ceil_div(num_tokens, size)
        return sum(
            min(whole, ceil_div(window + chunk - 2, size) + 1) if window else whole
            for window in self.windows
        )

    def max_feasible_tokens(self) -> int:
        """Most tokens that one request alone can feed, up to max_model_len."""
        low, high = 0, self.config.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_needed(middle) <= self.config.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    # -- prefix lookup ----------------------------------------------------------------------

    def hash_blocks(self, request: Request) -> list[bytes]:
        """Hashes of all full blocks of the tokens known on the host."""
        hashes, size = request.block_hashes, self.config.block_size
        tokens = request.token_ids
        extra = b"" if hashes else salt_extra(request.cache_salt)
        extend_hashes(hashes, tokens, size, self._digest, self._root, extra)
        return hashes

    def find_prefix(self, request: Request) -> PrefixHit:
        """Longest cached prefix, in whole blocks; the last token is never part of it, because its
        logits are needed. Changes nothing.

        With blocks of 4 tokens, a prompt of 13 has 3 whole blocks, a prompt of 12 may hit 2 of
        its 3. Say blocks 0 and 1 are cached, 2 is not. Full attention accepts 2. A group with a
        window of 5 tokens reads 4 before the next one: it needs the last block only, and accepts
        2 as well, even if its block 0 was freed. The hit is 2 blocks, 8 tokens:
        [b0, b1] of the one group, [null, b1] of the other.
        """
        if not self.config.enable_prefix_caching or request.skip_reading_prefix_cache:
            return PrefixHit(0, [[] for _ in self.windows])
        hashes = self.hash_blocks(request)
        length = min(len(hashes), (request.num_tokens - 1) // self.config.block_size)
        # Each group can only shorten the candidate; what all groups accept is the hit.
        while True:
            before = length
            for group in range(len(self.windows)):
                length = self._accepted(group, hashes, length)
            if length == before:
                break
        blocks = [self._hit_blocks(group, hashes, length) for group in range(len(self.windows))]
        return PrefixHit(length, blocks)

    def _accepted(self, group: int, hashes: list[bytes], limit: int) -> int:
        """Longest prefix of at most `limit` blocks that this group can serve."""
        lookup = self.pool.lookup
        window = self.windows[group]
        if not window:
            for i in range(limit):
                if lookup(group, hashes[i]) is None:
                    return i
            return limit
        needed = ceil_div(window - 1, self.config.block_size)
        run = 0  # cached blocks in a row, from the right
        for i in range(limit - 1, -1, -1):
            if run == needed:
                return i + 1 + run
            run = run + 1 if lookup(group, hashes[i]) is not None else 0
        return run

    def _hit_blocks(self, group: int, hashes: list[bytes], length: int) -> list[int]:
        window = self.windows[group]
        first = max(0, length - ceil_div(window - 1, self.config.block_size)) if window else 0
        blocks = [self.pool.null] * first
        for i in range(first, length):
            block = self.pool.lookup(group, hashes[i])
            assert block is not None
            blocks.append(block)
        return blocks

    # -- giving and taking blocks -----------------------------------------------------------

    def room_for(
        self, request: Request, hit: PrefixHit, num_tokens: int, *, whole: bool, reserve: int
    ) -> bool:
        """Can `request` start with `hit` and have blocks for its first `num_tokens`?

        whole: also ask room for all its known tokens. reserve: blocks that must stay free.
        """
        chunk = self.config.max_num_batched_tokens
        groups = len(self.windows)
        needed = (ceil_div(num_tokens, self.config.block_size) - hit.num_blocks) * groups
        if whole:
            all_blocks = self.blocks_needed(request.num_tokens, chunk)
            needed = max(needed, all_blocks - self._owned(hit))
        return needed + self._revived(hit) + reserve <= self.pool.num_free

    def most_tokens(self, hit: PrefixHit) -> int:
        """Tokens that could be had right now, starting with `hit`."""
        spare = (self.pool.num_free - self._revived(hit)) // len(self.windows)
        return (hit.num_blocks + spare) * self.config.block_size

    def admit(self, slot: int, hit: PrefixHit, num_tokens: int) -> None:
        """Fill an empty row: `hit`, then new blocks for `num_tokens` tokens (room was checked)."""
        null = self.pool.null
        # All groups' hits first: otherwise one group's new block could evict another's hit.
        for group, blocks in enumerate(hit.blocks):
            self.pool.touch(block for block in blocks if block != null)
            self.block_tables[group][slot, : hit.num_blocks] = blocks
            start = next((i for i, block in enumerate(blocks) if block != null), len(blocks))
            self._window_start[group][slot] = start
        self.table.num_blocks[slot] = hit.num_blocks
        self.table.num_registered[slot] = hit.num_blocks
        assert self.grow(slot, num_tokens)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Have blocks for `num_tokens` tokens. False, and nothing changed, when there are none."""
        have = int(self.table.num_blocks[slot])
        want = ceil_div(num_tokens, self.config.block_size)
        if want <= have:
            return True
        if (want - have) * len(self.windows) > self.pool.num_free:
            return False
        for rows in self.block_tables:
            rows[slot, have:want] = self.pool.take(want - have)
        self.table.num_blocks[slot] = want
        return True

    def grow_each(self, slots: Index, num_tokens: Int32) -> bool:
        """`grow` for many slots at once: all of them or, when blocks are short, none."""
        have = self.table.num_blocks[slots]
        want = -(-num_tokens // self.config.block_size)
        total = int((want - have).sum())
        if total * len(self.windows) > self.pool.num_free:
            return False
        # Entries to fill, one pair (slot, index) each; mostly one entry a slot.
        owner = np.repeat(slots, want - have)
        before = np.repeat(np.cumsum(want - have) - want, want - have)
        index = np.arange(total) - before
        for rows in self.block_tables:
            rows[owner, index] = self.pool.take(total)
        self.table.num_blocks[slots] = want
        return True

    def spare_tokens(self, slot: int) -> int:
        """Tokens more that the slot could feed right now."""
        blocks = int(self.table.num_blocks[slot]) + self.pool.num_free // len(self.windows)
        return blocks * self.config.block_size - int(self.table.num_computed[slot])

    def release_window(self, slot: int) -> None:
        """Free the blocks that no later token looks at, in groups with a window.

        Counts from the processed tokens: steps in flight may still read what they read.
        """
        if not self.has_windows:
            return
        processed = int(self.table.num_computed[slot] - self.table.in_flight[slot])
        for group, window in enumerate(self.windows):
            if not window:
                continue
            first = max(0, processed - window + 1) // self.config.block_size
            start = self._window_start[group][slot]
            if first > start:
                row = self.block_tables[group][slot]
                self.pool.release(row[start:first][::-1].tolist())
                row[start:first] = self.pool.null
                self._window_start[group][slot] = first

    def row_blocks(self, slot: int) -> list[list[int]]:
        """[group][num_blocks] the slot's block table, null entries included."""
        count = int(self.table.num_blocks[slot])
        return [rows[slot, :count].tolist() for rows in self.block_tables]

    def free(self, slot: int, *, forget: bool = False) -> None:
        """Take all blocks back, last first. forget: their contents must not be found again."""
        for group, blocks in enumerate(self.row_blocks(slot)):
            owned = blocks[self._window_start[group][slot] :][::-1]
            if forget:
                for block in owned:
                    self.pool.unregister(block)
            self.pool.release(owned)
            self.block_tables[group][slot, : len(blocks)] = self.pool.null
            self._window_start[group][slot] = 0
        self.table.num_blocks[slot] = 0

    # -- registering ------------------------------------------------------------------------

    def register(self, request: Request, num_tokens: int, step_id: int | None = None) -> None:
        """Let the full blocks of the first `num_tokens` tokens be found.

        step_id: the step that will write them, when its result is not here yet.
        """
        slot = request.slot
        first, last = int(self.table.num_registered[slot]), num_tokens // self.config.block_size
        if not self.config.enable_prefix_caching or first >= last:
            return
        hashes = self.hash_blocks(request)
        stored: list[int] = []
        for group, rows in enumerate(self.block_tables):
            start = max(first, self._window_start[group][slot])
            for i, block in enumerate(rows[slot, start:last].tolist(), start):
                self.pool.register(block, group, hashes[i])
                stored.append(block)
            if self.pool.events is not None and start < last:
                self.pool.events.append(self._stored_event(request, group, start, last))
        self.table.num_registered[slot] = last
        if step_id is not None and stored:
            self._uncertain.append((step_id, stored))

    def _stored_event(self, request: Request, group: int, first: int, last: int) -> BlockStored:
        size, hashes = self.config.block_size, request.block_hashes
        return BlockStored(
            block_hashes=hashes[first:last],
            parent_block_hash=hashes[first - 1] if first else None,
            token_ids=request.token_ids[first * size : last * size].tolist(),
            block_size=size,
            group_idx=group,
        )

    def step_done(self, step_id: int) -> None:
        """The contents written by steps up to this one are certain."""
        while self._uncertain and self._uncertain[0][0] <= step_id:
            self._uncertain.popleft()

    def forget_uncertain(self) -> None:
        """Unregister the blocks that a step without a result was to write."""
        while self._uncertain:
            for block in self._uncertain.popleft()[1]:
                self.pool.unregister(block)

    def clear_hashes(self) -> None:
        self._uncertain.clear()
        self.pool.clear_hashes()

    def _owned(self, hit: PrefixHit) -> int:
        return sum(block != self.pool.null for blocks in hit.blocks for block in blocks)

    def _revived(self, hit: PrefixHit) -> int:
        null = self.pool.null
        return sum(
            self.pool.count_free(block for block in blocks if block != null)
            for blocks in hit.blocks
        )
