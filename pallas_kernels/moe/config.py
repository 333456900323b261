"""Tile sizes of the grouped matrix product."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_TARGET = 190_000  # bytes; leaves room for barriers and the output tile


@dataclass(frozen=True)
class MoeConfig:
    """Tiles of `block_m` rows by `block_n` outputs; K in steps of block_k.

    Rows are the tensor core's 64 rows, one block of them a compute warpgroup. With `swap` the
    weights are (64 outputs a warpgroup) and `swap_rows` (8, 16 or 32) rows of x its columns,
    which wastes less where experts see few rows.
    """

    compute_wgs: int = 2
    block_n: int = 128
    block_k: int = 64
    stages: int = 4
    swap: bool = False
    swap_rows: int = 8

    @property
    def block_m(self) -> int:
        return self.swap_rows if self.swap else 64 * self.compute_wgs

    def shared_bytes(self, gated: bool, itemsize: int = 2) -> int:
        """Shared memory of a CTA, barriers left out."""
        step = (self.block_m + self.block_n * (2 if gated else 1)) * self.block_k
        return self.stages * step * itemsize + self.block_m * self.block_n * itemsize


def default_config(rows: int, experts: int, width: int, depth: int, gated: bool) -> MoeConfig:
    """A choice without a table: operands swapped where experts see few rows, 64 rows a tile where
    they see some, 128 otherwise."""
    parts = 2 if gated else 1
    mean = rows // max(experts, 1)
    if mean <= 32 and width % 64 == 0:
        wgs = 2 if width % 128 == 0 else 1
        tall = 8 if mean <= 10 else 16 if mean <= 20 else 32
        block_k = 128 if depth % 128 == 0 else 64
        step = (tall + parts * 64 * wgs) * block_k * 2
        return MoeConfig(wgs, 64 * wgs, block_k, min(8, SHARED_TARGET // step), True, tall)
    wgs = 1 if mean <= 64 else 2
    block_n = next((n for n in (128, 64, 32, 16, 8) if width % n == 0), 8)
    block_k = 128 if depth % 128 == 0 and wgs == 1 else 64
    stages = 4 if block_k == 64 else 2 if gated else 4
    return MoeConfig(wgs, block_n, block_k, stages)
