"""What a step takes: the shape that matters, and what a model of a device must answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jaxengine.sched.plan import StepPlan

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class StepShape:
    """Decode rows by the context they read, prefill rows by where they start and how much."""

    contexts: Counts  # [decode rows] tokens attended to, the row's own included
    starts: Counts  # [prefill rows] position of the chunk's first token
    counts: Counts  # [prefill rows] tokens of the chunk

    @staticmethod
    def of(plan: StepPlan) -> StepShape:
        start, count = plan.start.astype(np.int64), plan.num_new.astype(np.int64)
        # Where every row has one token, a prompt's run in the decode program too.
        d = plan.num_rows if plan.num_tokens == plan.num_rows else plan.num_decode
        return StepShape(start[:d] + count[:d], start[d:], count[d:])

    @property
    def decode_rows(self) -> int:
        return len(self.contexts)

    @property
    def rows(self) -> int:
        return len(self.contexts) + len(self.counts)

    @property
    def tokens(self) -> int:
        return len(self.contexts) + int(self.counts.sum())


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: host before it is submitted, device, host after its result is there.

    `bound`: what most of the device's time goes to, for reports.
    """

    plan_s: float
    device_s: float
    finish_s: float
    bound: str = "device"


class CostModel(Protocol):
    """A device and its host."""

    def step(self, shape: StepShape) -> StepCost: ...

    def transfer(self, num_bytes: int) -> float:
        """Seconds to copy so many bytes of KV between device and host memory, either way."""
        ...
