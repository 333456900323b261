"""Steps in flight: planned ahead, submitted, sampled, and finished in the order of submission.

    turn: plan ahead while there is room        (never waits for the device)
          else take the oldest step's result, reconcile it, and give out its tokens

A step with grammars samples apart from its forward, when the masks are known: at once if the
tokens before it are known, else as soon as the step before it has been reconciled. Either way the
masks are worked out while the forward runs.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from jaxengine.engine.assemble import Parts
from jaxengine.engine.outputs import NAN_ERROR, Collected
from jaxengine.engine.packer import pack_step
from jaxengine.sched.batch import Bucket
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.scheduler import Scheduler
from jaxengine.sched.sharded import ShardedScheduler
from jaxengine.sched.updates import UpdateBatch
from jaxengine.speculate.driver import WAIT, draft_masks
from jaxengine.wire.messages import EngineOutput, EngineStats


@dataclass
class StepInFlight:
    """A submitted step. `unsampled`: its masks wait for the step before it."""

    plans: list[StepPlan | None]  # by shard
    batch: Batch
    handle: Any
    unsampled: bool
    num_drafts: tuple[int, int]  # K asked for, and looked for
    began: float  # when its planning began


class Pipeline:
    """Up to `depth` steps on their way through the device."""

    def __init__(self, parts: Parts, depth: int, stats: EngineStats) -> None:
        """`stats` are counted up."""
        self.depth = depth
        self.speculation = parts.speculation
        self._executor, self._peers, self._lock = parts.executor, parts.peers, parts.lock
        self._packers, self._grammars = parts.packers, parts.grammars
        self._transfers, self._events, self._counts = parts.transfers, parts.events, parts.counts
        self._vocab_size = parts.facts.spec.vocab_size
        self._stats = stats

    def begin(self, scheduler: Scheduler | ShardedScheduler) -> None:
        """Carry out what this scheduler plans from now on. It has no requests yet."""
        self._scheduler, self._shards = scheduler, scheduler.shards
        self.forget()

    def forget(self) -> None:
        """Drop what is in flight: the device is gone, or about to be closed."""
        self._steps: deque[StepInFlight] = deque()
        self.collected = Collected()
        self._last_done = 0.0  # when the last result came; 0: there was no more to do

    @property
    def in_flight(self) -> int:
        return len(self._steps)

    @property
    def busy(self) -> bool:
        """There are steps in flight, requests, or KV on its way."""
        busy = bool(self._steps) or self._scheduler.has_work()
        return busy or self._transfers.has_pending()

    def turn(self, began: float) -> list[EngineOutput] | None:
        """Plan and submit a step, or finish the oldest. None when there was nothing to do: all that
        is left waits for something else, such as a grammar being compiled."""
        planned = len(self._steps) < self.depth and self._plan_ahead()
        if self._steps and not (planned and len(self._steps) < self.depth):
            return self.finish_oldest(began)
        self._stats.host_seconds += time.perf_counter() - began
        return [] if planned else None

    def _plan_ahead(self) -> bool:
        """Submit the next step. False when there is none."""
        began = time.perf_counter()
        in_flight = [step.batch.bucket for step in self._steps]
        drafts = self.speculation.choose(self._shards[0], in_flight, self.depth)
        if drafts == WAIT:
            return False
        plans = [shard.schedule() if shard.has_work() else None for shard in self._shards]
        self._transfers.dispatch(plans)
        shape = self._peers.shape(plans, self.busy)
        if shape is None:
            return False
        batch, num_drafts = self._packed(plans, shape, drafts)
        handle = self._peers.submit(batch)
        self._submitted(StepInFlight(plans, batch, handle, batch.masked, num_drafts, began))
        return True

    def _packed(
        self, plans: list[StepPlan | None], shape: tuple[Bucket, int], drafts: Bucket | None
    ) -> tuple[Batch, tuple[int, int]]:
        packers, tables = self._packers, [shard.block_tables for shard in self._shards]
        num_drafts = (0, 0) if plans[0] is None else self.speculation.planned(plans[0])
        if num_drafts[0] and drafts is not None and plans[0] is not None:
            return packers[0].pack_verify(plans[0], tables[0], drafts), num_drafts
        return pack_step(packers, plans, tables, shape), num_drafts

    def _submitted(self, step: StepInFlight) -> None:
        self._steps.append(step)
        live = [plan for plan in step.plans if plan is not None]
        if step.batch.masked and not any(plan.pending_grammar for plan in live):
            self._sample(step)
        if live:
            self._counts.submitted(step.batch.bucket, live)
            self._stats.num_steps += 1
            self._stats.step_tokens += sum(plan.num_tokens for plan in live)

    def _sample(self, step: StepInFlight) -> None:
        bucket, plan = step.batch.bucket, step.plans[0]
        if bucket.drafts and plan is not None:
            masks = draft_masks(plan, bucket, self._vocab_size)
        else:
            masks = self._grammars.masks(step.plans, step.batch.sampler_rows)
        self._executor.sample(step.handle, masks)
        step.unsampled = False

    def finish_oldest(self, began: float) -> list[EngineOutput]:
        """Take its result and reconcile it. `began`: since when the host has been at it."""
        step = self._steps.popleft()
        waited = time.perf_counter()
        with self._lock.released():
            results = self._executor.result(step.handle)
        done = time.perf_counter()
        updates = [
            (self._reconcile(shard, plan, result), result)
            for shard, plan, result in zip(self._shards, step.plans, results, strict=True)
            if plan is not None
        ]
        if step.plans[0] is not None:
            # All time since the step before: what the host did between counts too.
            seconds = done - (self._last_done or step.began)
            self.speculation.finished(
                step.plans[0], results[0], updates[0][0], step.num_drafts, seconds
            )
        self._last_done = done if self.busy else 0.0
        # First what the device waits for, then what the client waits for.
        if self._steps and self._steps[0].unsampled:
            self._sample(self._steps[0])
        outputs = [self.collected.output(u, result) for batch, result in updates for u in batch]
        self._stats.nan_rows += sum(output.error == NAN_ERROR for output in outputs)
        self.publish_events()
        ended = time.perf_counter()
        self._stats.step_seconds += ended - began
        self._stats.host_seconds += (ended - began) - (done - waited)
        return outputs

    def _reconcile(self, shard: Scheduler, plan: StepPlan, result: StepResult) -> UpdateBatch:
        self.collected.add(plan, result)
        updates = shard.update(plan, result)
        self._counts.reconciled(plan, len(updates))
        return updates

    def publish_events(self) -> None:
        """Publish what became of cached blocks since the last call."""
        self._events.publish(self._scheduler.take_events())
