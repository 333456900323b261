"""A device whose steps all take the same time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxengine.lab.bench.datasets import BenchRequest, with_arrivals
from jaxengine.lab.simulate.cluster import Cluster
from jaxengine.lab.simulate.cost import StepCost, StepShape
from jaxengine.lab.simulate.outcome import Outcome
from jaxengine.lab.simulate.workload import fixed_requests
from jaxengine.sched.config import SchedulerSizes


@dataclass(frozen=True)
class Constant:
    plan_s: float = 0.0
    device_s: float = 1.0
    finish_s: float = 0.0
    byte_s: float = 0.0

    def step(self, shape: StepShape) -> StepCost:
        return StepCost(self.plan_s, self.device_s, self.finish_s)

    def transfer(self, num_bytes: int) -> float:
        return num_bytes * self.byte_s


def cluster(cost: Constant | None = None, depth: int = 1, ranks: int = 1, **sizes: Any) -> Cluster:
    rest = {name: sizes.pop(name) for name in ("affinity", "tier") if name in sizes}
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    sched_sizes = SchedulerSizes(**{**small, "block_size": 4, "num_blocks": 256, **sizes})
    return Cluster(sched_sizes, cost or Constant(), ranks, depth, **rest)


def requests_at(times: list[float], prompt: int, output: int, **how: int) -> list[BenchRequest]:
    return with_arrivals(fixed_requests(len(times), prompt, output, **how), times)


def token_times(outcome: Outcome) -> list[list[float]]:
    return [[round(t, 9) for t in record.times] for record in outcome.records]
