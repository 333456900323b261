"""How many drafts at which batch size, as one list; and the shapes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxengine.speculate.config import SpeculativeConfig

WIDTHS = (1, 2, 3, 5, 7)  # drafts that programs are compiled for; fewer ride in a wider one


def compile_schedule(config: SpeculativeConfig, max_num_seqs: int) -> list[int]:
    """K by batch size, for 0 to max_num_seqs rows; sizes behind the last range have its K."""
    if not config.ranges:
        return [0] + [config.num_speculative_tokens] * max_num_seqs
    dense = [0] * (max_num_seqs + 1)
    for first, last, k in config.ranges:
        for size in range(first, min(last, max_num_seqs) + 1):
            dense[size] = k
    last, k = config.ranges[-1][1:]
    for size in range(last + 1, max_num_seqs + 1):
        dense[size] = k
    return dense


def width_of(k: int) -> int:
    """The compiled number of drafts that holds k."""
    return next((width for width in WIDTHS if width >= k), k)


def choices(most: int) -> tuple[int, ...]:
    """What an adaptive K chooses from, 0 first."""
    return tuple(k for k in (0, *WIDTHS) if k < most) + (most,) if most else (0,)


def reachable_shapes(
    schedule: Sequence[int], row_sizes: Sequence[int], adaptive: bool
) -> list[tuple[int, int]]:
    """(rows, drafts) of the programs that steps may ask for: the smallest first, then the
    largest, which can stand in for any that is still compiling."""
    shapes = set()
    for size, k in enumerate(schedule[1:], 1):
        rows = next(n for n in row_sizes if n >= size)
        ks = choices(k) if adaptive else (k,)
        shapes |= {(rows, width_of(each)) for each in ks if each}
    order = sorted(shapes)
    return order[:1] + order[:0:-1]
