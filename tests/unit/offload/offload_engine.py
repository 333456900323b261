"""The step loop over the fake device, with offload: a wrong byte anywhere changes a token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_device import FakeDevice
from step_loop import Engine

from jaxengine.offload.build import Offload, build_offload
from jaxengine.offload.config import OffloadConfig
from jaxengine.offload.jobs import Done, Job, OffloadStep
from jaxengine.offload.layout import KVLayout
from jaxengine.sched.config import GroupSpec, SchedulerSizes
from jaxengine.sched.scheduler import Scheduler

BLOCK = 4


def layout_for(sched_sizes: SchedulerSizes) -> KVLayout:
    """A page holds a fake block: block_size entries of 8 bytes."""
    return KVLayout(tuple(range(len(sched_sizes.groups))), sched_sizes.block_size, 1, 1, "float32")


def scheduler_sizes(
    num_blocks: int, windows: tuple[int, ...] = (0,), **more: Any
) -> SchedulerSizes:
    values = dict(
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=96,
        block_size=BLOCK,
        num_blocks=num_blocks,
        groups=tuple(GroupSpec(window) for window in windows),
    )
    return SchedulerSizes(**{**values, **more})


def config_for(slots: int, sched_sizes: SchedulerSizes, **more: Any) -> OffloadConfig:
    return OffloadConfig(cpu_bytes=slots * layout_for(sched_sizes).slot_bytes, **more)


@dataclass
class FakeTransfer:
    """Gathers at dispatch, as the device does; copies to the pool some polls later."""

    device: FakeDevice
    offload: Offload
    delay: int = 1  # polls until a transfer is done
    fails: Callable[[Job], bool] = lambda job: False
    pending: deque[tuple[int, Job, np.ndarray]] = field(default_factory=deque)
    polls: int = 0

    def dispatch(self, step: OffloadStep | None) -> None:
        if step is None:
            return
        for job in step.stores:
            data = self.device.kv[job.group][job.block_ids].copy()
            self.pending.append((self.polls + self.delay, job, data))
        for job in step.loads:
            data = np.stack([self.view(slot) for slot in job.slots])
            self.device.kv[job.group][job.block_ids] = -9 if self.fails(job) else data
            self.pending.append((self.polls + self.delay, job, data))

    def poll(self) -> list[Done]:
        self.polls += 1
        done: list[Done] = []
        while self.pending and self.pending[0][0] <= self.polls:
            _, job, data = self.pending.popleft()
            if self.fails(job):
                done.append(Done(job.job_id, False, "made to fail"))
                continue
            for slot, page in zip(job.slots, data, strict=True):
                if job.kind == "store":
                    self.view(slot)[:] = page
            done.append(Done(job.job_id, True, "", data.nbytes, 0.001))
        return done

    def view(self, slot: int) -> np.ndarray:
        return self.offload.pool.view(slot).view(np.int64)


class OffloadEngine(Engine):
    """`Engine` whose scheduler has an OffloadingConnector."""

    def __init__(
        self, sched_sizes: SchedulerSizes, config: OffloadConfig, depth: int = 2, **transfer: Any
    ) -> None:
        super().__init__(sched_sizes, depth)
        self.offload = build_offload(
            config, layout_for(sched_sizes), sched_sizes, {"model": "fake"}
        )
        self.connector = self.offload.connector
        self.scheduler = Scheduler(sched_sizes, connector=self.connector)
        self.connector.bind(self.scheduler.state.kv)
        self.device = FakeDevice(sched_sizes, self.scheduler.block_tables)
        self.transfer = FakeTransfer(self.device, self.offload, **transfer)

    def submit(self) -> bool:
        self.connector.on_transfers(self.transfer.poll())
        if failed := self.connector.take_failed():
            for request in self.scheduler.abort(failed):
                self.reasons[request.request_id] = "error"
        if len(self.flight) >= self.depth:
            return False
        plan = self.scheduler.schedule() if self.scheduler.has_work() else None
        self.scheduler.check_integrity()
        self.transfer.dispatch(plan.connector_meta if plan else self.connector.take_step())  # type: ignore[arg-type]
        if plan is None:
            return False
        self.steps += 1
        self.flight.append((plan, self.device.run(plan)))
        return True

    def run(self, seconds: float = 20.0) -> None:
        """Until all is done and no transfer is under way."""
        deadline = time.monotonic() + seconds
        while self.scheduler.has_work() or self.flight or self.connector.has_pending():
            if not (self.submit() and len(self.flight) < self.depth) and not self.take():
                if not self.scheduler.has_work():
                    self.connector.poll()
                time.sleep(0.0002)
            assert time.monotonic() < deadline, f"stuck with {self.scheduler.state.requests}"
        self.scheduler.check_integrity()
        self.offload.connector.manager.host.check()
        assert self.offload.connector.manager.host.num_busy == 0
        assert self.scheduler.kv_usage == 0

    def ask(self, name: str, tokens: list[int], max_tokens: int, **more: object) -> list[int]:
        """Run one request to its end; returns its output."""
        self.add(name, tokens, max_tokens, **more)
        self.run()
        return self.seen[name]

    def count(self, name: str) -> float:
        return self.connector.stats().get(name, 0)

    def forget_device(self) -> None:
        """As if everything had been evicted from the device."""
        self.scheduler.state.kv.clear_hashes()
        self.device.reset()
