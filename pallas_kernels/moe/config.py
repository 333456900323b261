"""Tile sizes of the grouped matrix product."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeConfig:
    """Tiles of 64 * compute_wgs rows by block_n columns; K in steps of block_k."""

    compute_wgs: int = 2
    block_n: int = 128
    block_k: int = 64
    stages: int = 4

    @property
    def block_m(self) -> int:
        return 64 * self.compute_wgs

    def shared_bytes(self, gated: bool, itemsize: int = 2) -> int:
        """Shared memory of a CTA, barriers left out."""
        step = (self.block_m + self.block_n * (2 if gated else 1)) * self.block_k
        return self.stages * step * itemsize + self.block_m * self.block_n * itemsize


def default_config(rows: int, experts: int, width: int, depth: int, gated: bool) -> MoeConfig:
    """A choice without a table: 64 rows a tile where experts see few."""
    wgs = 1 if rows // max(experts, 1) <= 64 else 2
    block_n = next((n for n in (128, 64, 32, 16, 8) if width % n == 0), 8)
    block_k = 128 if depth % 128 == 0 and wgs == 1 else 64
    stages = 4 if block_k == 64 else 2 if gated else 4
    return MoeConfig(wgs, block_n, block_k, stages)
