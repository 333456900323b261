"""How far a prefix can be loaded when KV groups have windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Reach = int | None  # blocks before a position that a group looks at; None = all


def reach_of(window: int, block_size: int) -> Reach:
    """window: tokens, 0 for full attention."""
    return -(-(window - 1) // block_size) if window else None


def loadable_blocks(
    reaches: Sequence[Reach], first: int, limit: int, has: Callable[[int, int], bool]
) -> int:
    """Longest prefix, in blocks, of at most `limit`, given that the first `first` blocks are on
    the device. has(group, block): the block can be loaded.

    Full-attention groups need every block from `first` on, windowed ones only those that the
    next token looks at. Returns `first` when nothing can be loaded.
    """
    for group, reach in enumerate(reaches):
        if reach is None:
            limit = next((i for i in range(first, limit) if not has(group, i)), limit)
    length, windowed = limit, [(g, reach) for g, reach in enumerate(reaches) if reach is not None]
    while length > first:
        missing = [
            i
            for group, reach in windowed
            for i in range(length - 1, max(first, length - reach) - 1, -1)
            if not has(group, i)
        ]
        if not missing:
            return length
        length = max(missing)  # every longer prefix looks at it, too
    return first


def needed_blocks(reaches: Sequence[Reach], first: int, last: int) -> list[range]:
    """[group] blocks to load for a prefix of `last` blocks of which `first` are on the device."""
    return [range(first if r is None else max(first, last - r), last) for r in reaches]
