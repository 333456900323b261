"""Tile sizes of the attention kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionConfig:
    """compute_wgs warpgroups of 64 query rows each; KV blocks of `block_kv` tokens in a ring of
    `stages`; `lanes` independent streams of work share an SM."""

    compute_wgs: int = 1
    block_kv: int = 64
    stages: int = 2
    lanes: int = 2

    @property
    def rows(self) -> int:
        """Query rows of a tile: (token, head of the group) pairs."""
        return 64 * self.compute_wgs

    def shared_bytes(self, head_dim: int, kv_bytes: int = 2) -> int:
        """Shared memory of a CTA, barriers left out."""
        ring = 2 * self.stages * self.block_kv * head_dim * kv_bytes
        staged = 2 * self.block_kv * head_dim * 2 if kv_bytes == 1 else 0
        return self.lanes * (2 * self.rows * head_dim * 2 + ring + staged)


def default_config(
    head_dim: int, tokens_per_row: int, group: int, fp8: bool = False, *, extras: bool = False
) -> AttentionConfig:
    """A choice without a table: 64 rows for decode, 128 for longer chunks of prompts.

    `extras` says that scores are capped or have sinks, which takes registers: such prompts get
    smaller KV blocks, or the kernel spills.
    """
    if fp8:
        return AttentionConfig(1, 64, 4 if head_dim <= 128 else 2, 1)
    if head_dim > 192:
        return AttentionConfig(1, 64, 2, 1)
    if tokens_per_row * group <= 64:
        return AttentionConfig(1, 64, 2, 2 if head_dim <= 128 else 1)
    if head_dim > 128:
        return AttentionConfig(1 if extras else 2, 64, 2, 1)
    return AttentionConfig(2, 64, 3, 1) if extras else AttentionConfig(2, 128, 2, 1)
