"""What the scheduler side and the device side tell each other: plain data, msgpack on the wire."""

from __future__ import annotations

from typing import Literal

import msgspec


class Job(msgspec.Struct, frozen=True):
    """Copy pages between device blocks and host slots: block_ids[i] <-> slots[i]."""

    job_id: int
    kind: Literal["store", "load"]
    group: int
    block_ids: list[int]
    slots: list[int]

    def moved(self, first: int) -> Job:
        """The same in a cache where the job's blocks begin at `first` (a shard's)."""
        if first == 0:
            return self
        blocks = [first + block for block in self.block_ids]
        return msgspec.structs.replace(self, block_ids=blocks)


class Done(msgspec.Struct, frozen=True):
    """A job that ended. `seconds` from dispatch to the last byte; `bytes` moved."""

    job_id: int
    ok: bool
    error: str = ""
    bytes: int = 0
    seconds: float = 0.0


class OffloadStep(msgspec.Struct, frozen=True):
    """Transfers of one step. The device dispatches all stores, then all loads, then the step's
    forward pass: in this order nothing is read after it was overwritten."""

    stores: list[Job]
    loads: list[Job]
