"""Work list of the attention kernel: which CTA attends which blocks of which query tile.

The batch's work is laid on one line: every (query tile, kv head) is a run of units, one for its
start-up and one for each KV block it reads. The line is cut in equal parts, one a CTA, so load is
balanced whatever the lengths (the stream-K idea of Osama et al., 2023, applied to attention). A
cut inside a run splits it; its parts are combined afterwards. Everything is prefix sums and
binary searches, so the same code runs on NumPy arrays and, when lengths are known on the device
only, on jnp arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Columns of AttentionPlan.tiles.
ROW, TOKEN, COUNT, POSITION, KV_END, BEGIN_BLOCK, START, UNITS = range(8)
# Columns of AttentionPlan.ctas.
LOW, HIGH, FIRST_RUN, NUM_RUNS, MERGE_RUN, MERGE_SLOT, MERGE_LAST, UNUSED = range(8)
MIN_UNITS = 5  # least work of a CTA: start-up and four blocks
SNAP = 3  # a part shorter than this joins its neighbour


class AttentionPlan(NamedTuple):
    """int32 arrays; run = tile * kv_heads + head.

    tiles [nt, 8]: row, first token in the batch, tokens, position of the first token, end of the
    keys it sees, first KV block, first unit on the line (of head 0), units of one head (0: unused
    tile).
    ctas [num_ctas, 8]: units low..high of this CTA, first run, number of runs; then the split run
    it combines (-1: none), the slot of that run's first part and the CTA of its last.
    A CTA's parts lie in slot 2 * cta (its first run) and 2 * cta + 1 (a later one).
    """

    tiles: Any
    ctas: Any


def max_tiles(num_tokens: int, num_rows: int, tile_tokens: int) -> int:
    """Query tiles that a batch of at most `num_tokens` in `num_rows` rows can need."""
    return num_tokens // tile_tokens + min(num_rows, num_tokens)


def plan_attention(
    q_start: Any,
    kv_len: Any,
    *,
    tile_tokens: int,
    kv_heads: int,
    block_kv: int,
    num_ctas: int,
    num_tiles: int,
    window: int = 0,
    split: bool = True,
    xp: Any = np,
) -> AttentionPlan:
    """Plan for rows whose tokens are q_start[i] .. q_start[i + 1] of the batch.

    q_start [S + 1] and kv_len [S] are int32; a row's last token has position kv_len - 1.
    `num_tiles` is the static size of the tile table, at least `max_tiles(...)`. split=False
    leaves runs whole: less balanced, but a row's result does not depend on its neighbours.
    """
    q_start = xp.asarray(q_start, xp.int32)
    kv_len = xp.asarray(kv_len, xp.int32)
    q_len = q_start[1:] - q_start[:-1]
    tiles_of_row = -(-q_len // tile_tokens)
    tile_end = xp.cumsum(tiles_of_row, dtype=xp.int32)
    index = xp.arange(num_tiles, dtype=xp.int32)
    row = xp.minimum(xp.searchsorted(tile_end, index, side="right"), q_len.shape[0] - 1)
    used = index < tile_end[-1]
    first = (index - (tile_end[row] - tiles_of_row[row])) * tile_tokens
    count = xp.where(used, xp.minimum(tile_tokens, q_len[row] - first), 0)
    position = kv_len[row] - q_len[row] + first
    kv_end = xp.where(used, position + count, 0)
    begin = xp.maximum(position - window + 1, 0) // block_kv if window else xp.zeros_like(row)
    blocks = xp.maximum(-(-kv_end // block_kv) - begin, 0)
    units = xp.where(used, 1 + blocks, 0)
    end = xp.cumsum(units * kv_heads, dtype=xp.int32)
    start = end - units * kv_heads
    tiles = [row, q_start[row] + first, count, position, kv_end, begin, start, units]

    total = end[-1]
    share = xp.maximum(-(-total // num_ctas), MIN_UNITS)
    raw = xp.minimum(xp.arange(num_ctas + 1, dtype=xp.int32) * share, total)
    run, offset, length = _locate(raw, end, start, units, kv_heads, xp)
    if split:
        snapped = xp.where(offset < SNAP, 0, xp.where(length - offset < SNAP, length, offset))
    else:
        snapped = xp.where(2 * offset < length, 0, length)
    cut = raw - offset + snapped
    low, high = cut[:-1], cut[1:]
    run, offset, length = _locate(cut, end, start, units, kv_heads, xp)
    busy = high > low
    # A cut at a run's start belongs to the run before it, for the CTA that ends there.
    last_run = run[1:] - (offset[1:] == 0)
    num_runs = xp.where(busy, last_run - run[:-1] + 1, 0)
    run_start = high - offset[1:]
    merges = busy & (offset[1:] > 0) & (low <= run_start)
    merge_last = xp.searchsorted(low, run_start + length[1:], side="left") - 1
    slot = 2 * xp.arange(num_ctas, dtype=xp.int32) + (num_runs > 1)
    ctas = [low, high, run[:-1], num_runs, xp.where(merges, run[1:], -1), slot, merge_last]
    ctas.append(xp.zeros_like(low))
    return AttentionPlan(
        xp.stack([c.astype(xp.int32) for c in tiles], axis=1),
        xp.stack([c.astype(xp.int32) for c in ctas], axis=1),
    )


def _locate(
    unit: Any, end: Any, start: Any, units: Any, kv_heads: int, xp: Any
) -> tuple[Any, Any, Any]:
    """Run that holds each unit, the unit's offset in it, and the run's length.

    The end of the line is offset 0 of the run after the last.
    """
    tile = xp.searchsorted(end, unit, side="right").astype(xp.int32)
    inside = tile < end.shape[0]
    tile = xp.minimum(tile, end.shape[0] - 1)
    length = xp.maximum(units[tile], 1)
    within = unit - start[tile]
    head = xp.where(inside, within // length, 0)
    offset = xp.where(inside, within - head * length, 0)
    # At the end of the line: the run after the last used one.
    used = xp.sum(units > 0).astype(xp.int32)
    run = xp.where(inside, tile * kv_heads + head, used * kv_heads)
    return run.astype(xp.int32), offset.astype(xp.int32), length.astype(xp.int32)
