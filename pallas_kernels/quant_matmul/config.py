"""Tile sizes of products with quantised weights."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_K = 128  # inputs a step; also the block in which int4 is packed
MAX_ROWS = 64  # tokens; more make XLA's choice (dequantise and multiply, or cuBLASLt) the better


@dataclass(frozen=True)
class QuantConfig:
    """int8 and int4: 64 outputs a CTA, `splits` CTAs share the inputs, `stages` blocks in
    flight."""

    splits: int = 1
    stages: int = 6

    def shared_bytes(self, rows: int, kind: str) -> int:
        """Shared memory of a CTA, barriers left out."""
        weights = 64 * BLOCK_K // (2 if kind == "int4" else 1)
        return self.stages * (weights + rows * BLOCK_K * 2)


@dataclass(frozen=True)
class Fp8Config:
    """fp8: 64 * compute_wgs outputs by block_t tokens a CTA; otherwise as QuantConfig."""

    splits: int = 1
    stages: int = 6
    compute_wgs: int = 2
    block_t: int = 64

    def shared_bytes(self) -> int:
        """Shared memory of a CTA, barriers left out."""
        outputs = 64 * self.compute_wgs
        return (self.stages * BLOCK_K + 2) * outputs + self.block_t * self.stages * BLOCK_K


def default_config(outputs: int, inputs: int, rows: int, num_sms: int) -> QuantConfig:
    """As many parts of the inputs as bring about two CTAs to every SM."""
    splits = _splits(outputs // 64, inputs // BLOCK_K, num_sms)
    return QuantConfig(splits, 6 if rows <= 32 else 4)


def default_fp8(outputs: int, inputs: int, rows: int, num_sms: int) -> Fp8Config:
    """All tokens in one block up to 64, blocks of 128 beyond; two warpgroups where they fit."""
    block_t = next((t for t in (8, 16, 32, 64) if rows <= t), 128)
    wgs = 2 if outputs % 128 == 0 else 1
    tiles = outputs // (64 * wgs) * -(-rows // block_t)
    return Fp8Config(_splits(tiles, inputs // BLOCK_K, num_sms), 5, wgs, block_t)


def _splits(tiles: int, steps: int, num_sms: int) -> int:
    splits = 1
    while tiles * splits < 2 * num_sms and steps % (splits * 2) == 0 and steps // splits >= 8:
        splits *= 2
    return splits
