"""KV offload in the engine core: one connector a shard, and their jobs to and from the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jaxengine.config import EngineConfig
from jaxengine.executor.facts import Facts
from jaxengine.offload.build import Offload, build_offload
from jaxengine.offload.config import parse_offload
from jaxengine.offload.jobs import OffloadStep
from jaxengine.sched.connector import KVConnector
from jaxengine.sched.executor import Executor
from jaxengine.sched.plan import StepPlan
from jaxengine.sched.scheduler import Scheduler


class Transfers:
    """The tiers of every shard. They outlive the device's process."""

    def __init__(self, config: EngineConfig, executor: Executor, facts: Facts) -> None:
        """Raises ValueError that names the setting."""
        wanted = parse_offload(config.cache.kv_transfer_config, config.cache.kv_offloading_size)
        self._executor = executor
        self._offloads: list[Offload] = []
        if wanted is None:
            return
        if config.parallel.nnodes > 1 or config.parallel.pipeline_parallel_size > 1:
            raise ValueError("KV offload works within one node and without pipeline stages")
        shared = config.fault.enable_fault_tolerance
        rank = config.data_parallel.data_parallel_rank or 0
        for shard in range(facts.num_shards):
            share = wanted.share(facts.num_shards, shard, rank)
            self._offloads.append(
                build_offload(share, facts.kv_layout, facts.sched_sizes, facts.kv_facts, shared)
            )
        executor.open_transfers([o.pool for o in self._offloads], facts.kv_layout)

    def connector(self, shard: int) -> KVConnector | None:
        """The connector that this shard's scheduler asks; None without tiers."""
        return self._offloads[shard].connector if self._offloads else None

    def bind(self, schedulers: Sequence[Scheduler]) -> None:
        """Connect the tiers to new schedulers."""
        for offload, scheduler in zip(self._offloads, schedulers, strict=False):
            offload.connector.bind(scheduler.state.kv)

    def dispatch(self, plans: Sequence[StepPlan | None]) -> None:
        """Hand the transfers of a step to the device, ahead of its forward. A shard without a plan
        may have some too."""
        if not self._offloads:
            return
        steps: list[OffloadStep | None] = []
        for offload, plan in zip(self._offloads, plans, strict=True):
            meta = offload.connector.take_step() if plan is None else plan.connector_meta
            assert meta is None or isinstance(meta, OffloadStep)
            steps.append(meta)
        if any(step is not None for step in steps):
            self._executor.transfer(steps)

    def poll(self) -> list[tuple[str, str]]:
        """Take in what ended. Returns requests that must end now, each with the reason."""
        if not self._offloads:
            return []
        failed = []
        done = self._executor.poll_transfers()
        for offload, ended in zip(self._offloads, done, strict=True):
            offload.connector.on_transfers(ended)
            offload.connector.poll()
            failed += [
                (name, "KV blocks could not be loaded") for name in offload.connector.take_failed()
            ]
        return failed

    def settle(self, seconds: float = 30.0) -> None:
        """Finish what is on its way, before the device's memory goes."""
        deadline = time.monotonic() + seconds
        while self.has_pending() and time.monotonic() < deadline:
            self.dispatch([None] * len(self._offloads))
            self.poll()
            time.sleep(0.001)

    def has_pending(self) -> bool:
        """Something is still on its way; keep polling."""
        return any(offload.connector.has_pending() for offload in self._offloads)

    @property
    def is_open(self) -> bool:
        """True when there is a tier behind the device."""
        return bool(self._offloads)

    def stats(self) -> dict[str, float]:
        """Figures of all shards together."""
        total: dict[str, float] = {}
        for offload in self._offloads:
            for name, value in offload.connector.stats().items():
                total[f"kv_offload_{name}"] = total.get(f"kv_offload_{name}", 0.0) + value
        return total

    def close(self) -> None:
        for offload in self._offloads:
            offload.close()
