"""Tile sizes of the weight-only matrix product."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_K = 128  # inputs a step; also the block in which int4 is packed
MAX_ROWS = 64  # tokens; more make XLA's dequantise-and-multiply the better choice


@dataclass(frozen=True)
class QuantConfig:
    """64 outputs a CTA, `splits` CTAs share the inputs, `stages` blocks in flight."""

    splits: int = 1
    stages: int = 6

    def shared_bytes(self, rows: int, kind: str) -> int:
        """Shared memory of a CTA, barriers left out."""
        weights = 64 * BLOCK_K // (2 if kind == "int4" else 1)
        return self.stages * (weights + rows * BLOCK_K * 2)


def default_config(outputs: int, inputs: int, rows: int, num_sms: int) -> QuantConfig:
    """As many parts of the inputs as bring about two CTAs to every SM."""
    tiles, steps = outputs // 64, inputs // BLOCK_K
    splits = 1
    while tiles * splits < 2 * num_sms and steps % (splits * 2) == 0 and steps // splits >= 8:
        splits *= 2
    return QuantConfig(splits, 6 if rows <= 32 else 4)
