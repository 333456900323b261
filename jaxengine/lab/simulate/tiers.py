"""Host memory behind a simulated device: the real connector, host tier and eviction policy; only
the bytes and their copies are made up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxengine.lab.simulate.cost import CostModel
from jaxengine.lab.simulate.outcome import RankFigures
from jaxengine.offload.config import GIB, OffloadConfig
from jaxengine.offload.connector import OffloadingConnector
from jaxengine.offload.counters import Counters
from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.jobs import Done, Job, OffloadStep
from jaxengine.offload.manager import OffloadManager
from jaxengine.offload.policies import make_policy
from jaxengine.offload.tiers.host import HostTier
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.plan import StepPlan


@dataclass(frozen=True)
class TierConfig:
    """Host memory of one rank. `page_bytes`: of one block, by KV group."""

    gib: float
    page_bytes: tuple[int, ...]
    policy: str = "lru"

    @property
    def num_slots(self) -> int:
        return int(self.gib * GIB) // max(self.page_bytes)


class HostMemory:
    """One rank's. Copies queue on one link for each direction, in the order of dispatch."""

    def __init__(self, config: TierConfig, sched_sizes: SchedulerSizes, cost: CostModel) -> None:
        """Raises ValueError when not one block fits, or for an unknown policy."""
        if config.num_slots < 1:
            raise ValueError(
                f"cpu_offload_gib {config.gib} does not hold one block of "
                f"{max(config.page_bytes)} bytes"
            )
        self._page_bytes = config.page_bytes
        self._cost = cost
        self._now = 0.0
        # Nobody touches the bytes: the smallest page that a pool can have.
        host = HostTier(PagePool(config.num_slots, 1), make_policy(config.policy, config.num_slots))
        manager = OffloadManager(host, [], lambda group: config.page_bytes[group], Counters())
        settings = OffloadConfig(int(config.gib * GIB), eviction_policy=config.policy)
        self.connector = OffloadingConnector(
            settings, sched_sizes, manager, clock=lambda: self._now
        )
        self._free = {"store": 0.0, "load": 0.0}  # when the link is free
        self._under_way: deque[tuple[float, Done]] = deque()

    def dispatch(self, plan: StepPlan | None, now: float) -> None:
        """Start the copies that go with this plan, or those that wait when there is none."""
        step = self.connector.take_step() if plan is None else plan.connector_meta
        if step is None:
            return
        assert isinstance(step, OffloadStep)
        for job in (*step.stores, *step.loads):
            self._start(job, now)

    def _start(self, job: Job, now: float) -> None:
        size = len(job.slots) * self._page_bytes[job.group]
        end = max(now, self._free[job.kind]) + self._cost.transfer(size)
        self._free[job.kind] = end
        self._under_way.append((end, Done(job.job_id, True, bytes=size, seconds=end - now)))

    def advance(self, now: float) -> None:
        """Take in the copies that have ended by `now`."""
        self._now = now
        done = [end for time, end in self._under_way if time <= now]
        if done:
            self._under_way = deque(pair for pair in self._under_way if pair[0] > now)
            self.connector.on_transfers(done)

    def next_end(self) -> float | None:
        """When the next copy ends."""
        return min((time for time, _ in self._under_way), default=None)

    def count(self, figures: RankFigures) -> None:
        """Write the tier's counters into a rank's figures."""
        counters = self.connector.manager.counters
        figures.host_hits = int(counters.get("external_hits"))
        figures.loaded_bytes = int(counters.get("load_bytes"))
        figures.stored_bytes = int(counters.get("store_bytes"))
