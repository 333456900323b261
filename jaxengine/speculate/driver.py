"""The engine's side of speculation: before every step, how many drafts and whose; after it, what
became of them. No JAX.

Drafts are verified in steps of decode rows only. In an asynchronous engine the newest tokens are on
the device alone, so that n-grams are looked up there; the host only says which rows are worth it.
Rows with drafts in flight are of unknown length on the host: only another step with drafts may
follow them, all else waits for their result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from jaxengine.sched.batch import Bucket
from jaxengine.sched.buckets import row_buckets
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.executor import Verifier
from jaxengine.sched.plan import Int32, StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler
from jaxengine.sched.updates import UpdateBatch
from jaxengine.sched.verify_batch import ON_DEVICE
from jaxengine.speculate.config import SpeculativeConfig
from jaxengine.speculate.proposer import make_proposer
from jaxengine.speculate.schedule import choices, compile_schedule, reachable_shapes

WAIT: Literal["wait"] = "wait"  # first take the result of a step in flight


class Controller(Protocol):
    """Chooses K while the engine runs."""

    def choose(self, batch_size: int) -> int: ...
    def observe(
        self,
        batch_size: int,
        k: int,
        seconds: float,
        drafts: int,
        accepted_by_position: Sequence[int],
    ) -> None:
        """A step with `drafts` drafts in all took so long; `accepted_by_position[i]` rows kept
        their first i + 1 drafts."""
        ...


class Speculator:
    """One engine's drafts. One thread."""

    def __init__(
        self,
        config: SpeculativeConfig,
        sched_sizes: SchedulerSizes,
        executor: Verifier,
        warmup: str,
    ) -> None:
        self.config = config
        self._executor = executor
        self._schedule = compile_schedule(config, sched_sizes.max_num_seqs)
        self._proposer = make_proposer(config)
        self._most = max(self._schedule)
        self._controller = _controller(config.adaptive, self._most)
        self._seen: set[str] = set()  # requests the proposer may know
        self._k = 0  # of the step that was chosen last
        self._tried = 0  # drafts a row that were looked for before it
        self.counts = SpeculationCounts(self._most)
        shapes = reachable_shapes(
            self._schedule, row_buckets(sched_sizes.max_num_seqs), config.adaptive
        )
        # The executor's drafter takes the place of the look-up.
        lookup = (
            (0, 0) if config.has_model else (config.prompt_lookup_min, config.prompt_lookup_max)
        )
        executor.open_speculation(shapes, lookup, warmup)

    def k_of(self, batch_size: int) -> int:
        """Drafts a row in a step of so many rows."""
        k = self._schedule[batch_size]
        if k == 0 or self._controller is None:
            return k
        return min(k, self._controller.choose(batch_size))

    def choose(
        self, scheduler: Scheduler, in_flight: Sequence[Bucket], depth: int
    ) -> Bucket | Literal["wait"] | None:
        """Set the drafts of the next step and give its shape; None for a step without any."""
        scheduler.state.table.num_drafts[:] = 0
        self._k = self._tried = 0
        began = time.perf_counter()
        chosen = self._with_drafts(scheduler, bool(in_flight), depth)
        self.counts.seconds += time.perf_counter() - began
        if chosen is None and any(bucket.drafts for bucket in in_flight):
            return WAIT
        return chosen

    def _with_drafts(
        self, scheduler: Scheduler, in_flight: bool, depth: int
    ) -> Bucket | Literal["wait"] | None:
        state = scheduler.state
        running, count = state.running, len(state.running)
        k = self.k_of(count)
        if k == 0:
            return None
        may_admit = scheduler.num_waiting > 0 and count < scheduler.config.max_num_seqs
        slots = state.running_slots()
        if may_admit or not state.table.sampled[slots].all():
            return None  # prompts come first
        bucket = self._executor.choose_verify(count, k)
        if bucket is None:
            return None
        on_host = not self.config.has_model and (depth == 1 or self.config.method != "ngram")
        if on_host or state.table.has_grammar[slots].any():
            if in_flight:
                return WAIT
            on_host = True
        # The most tokens that steps in flight may add, and these drafts behind them.
        room = self.config.max_model_len - (depth - 1) * (1 + k) - k
        short = [request for request in running if request.num_tokens <= room]
        if self.config.has_model:
            found = [_by_model(scheduler, request, k) for request in short]
        else:
            found = [self._drafts_of(scheduler, request, k, on_host) for request in short]
        self._tried = k
        self._forget_ended(scheduler)
        if not any(found):
            return None
        self._k = k
        return bucket

    def _drafts_of(self, scheduler: Scheduler, request: Request, k: int, on_host: bool) -> bool:
        drafts = self._proposer.propose(request.request_id, request.token_ids, k)
        self._seen.add(request.request_id)
        if drafts and not on_host:
            drafts = [ON_DEVICE] * k
        elif drafts and request.grammar is not None:
            drafts = drafts[: request.grammar.validate(drafts)]
        scheduler.set_drafts(request, drafts)
        return bool(drafts)

    def _forget_ended(self, scheduler: Scheduler) -> None:
        if len(self._seen) > 2 * len(scheduler.state.requests) + 8:
            for name in self._seen - scheduler.state.requests.keys():
                self._proposer.forget(name)
            self._seen &= scheduler.state.requests.keys()

    def planned(self, plan: StepPlan) -> tuple[int, int]:
        """K of this plan, the one of the last choice, 0 when its rows have no drafts; and how many
        were looked for."""
        with_drafts = plan.num_drafts.any() or plan.uncertain.any()
        return (self._k if with_drafts else 0), self._tried

    def finished(
        self,
        plan: StepPlan,
        result: StepResult,
        update: UpdateBatch,
        planned: tuple[int, int],
        seconds: float,
    ) -> None:
        """Take note of a step's result. `planned` is of its plan; `seconds`: all time since the
        step before it, or since it was begun."""
        if plan.num_decode < plan.num_rows:
            return
        k, tried = planned
        accepted, drafted = _accepted(result, update), 0
        if result.num_drafted is not None:
            drafted = int(result.num_drafted.sum())
            self.counts.add(int(np.count_nonzero(result.num_drafted)), drafted, accepted)
        self.counts.steps_by_k[k] += 1
        if self._controller is not None:
            self._controller.observe(plan.num_rows, max(k, tried), seconds, drafted, accepted)

    def stats(self) -> dict[str, float]:
        """Counters since the start, for `EngineStats.extra`."""
        return self.counts.stats()


class SpeculationCounts:
    """Counters since the start. Accepted drafts are those given out: what a stop or max_tokens
    cuts off does not count."""

    def __init__(self, most: int) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_by_place = [0] * most
        self.steps_by_k = [0] * (most + 1)
        self.seconds = 0.0  # of the host, choosing and drafting

    def add(self, drafts: int, tokens: int, accepted: list[int]) -> None:
        self.num_drafts += drafts
        self.num_draft_tokens += tokens
        self.num_accepted_tokens += sum(accepted)
        for place, count in enumerate(accepted[: len(self.accepted_by_place)]):
            self.accepted_by_place[place] += count

    def stats(self) -> dict[str, float]:
        """Flat names for `EngineStats.extra`."""
        figures = {
            "spec_num_drafts": float(self.num_drafts),
            "spec_num_draft_tokens": float(self.num_draft_tokens),
            "spec_num_accepted_tokens": float(self.num_accepted_tokens),
            "spec_draft_seconds": self.seconds,
        }
        for place, count in enumerate(self.accepted_by_place):
            figures[f"spec_num_accepted_tokens_pos_{place}"] = float(count)
        for k, count in enumerate(self.steps_by_k):
            figures[f"spec_steps_k{k}"] = float(count)
        return figures


def _by_model(scheduler: Scheduler, request: Request, k: int) -> bool:
    """The device drafts for every row; but its tokens come too late for a grammar's masks."""
    drafts = [ON_DEVICE] * k if request.grammar is None else []
    scheduler.set_drafts(request, drafts)
    return bool(drafts)


def draft_masks(plan: StepPlan, bucket: Bucket, vocab_size: int) -> Int32:
    """[rows * (1 + K), ceil(V / 32)] legal tokens at every place of every row. A place that no
    draft leads to allows all: its token is never kept."""
    from jaxengine.structured.matcher import fill_draft_bitmasks  # a library of its own

    places = 1 + bucket.drafts
    out: Int32 = np.full((bucket.rows, places, -(-vocab_size // 32)), -1, np.int32)
    for row, request in enumerate(plan.requests):
        if request.grammar is not None:
            drafts = request.spec_token_ids[: int(plan.num_drafts[row])]
            fill_draft_bitmasks(request.grammar, drafts, out[row, : 1 + len(drafts)])
    return out.reshape(bucket.rows * places, -1)


def _accepted(result: StepResult, update: UpdateBatch) -> list[int]:
    """By place, how many rows gave out their draft."""
    if result.num_drafted is None:
        return []
    drafts = result.num_sampled[update.rows] - 1  # the last token is the target's own
    kept = np.minimum(drafts, update.num_new)
    return [int(np.count_nonzero(kept > place)) for place in range(result.token_ids.shape[1] - 1)]


def _controller(adaptive: bool, most: int) -> Controller | None:
    if not adaptive:
        return None
    from jaxengine.speculate.adaptive import AdaptiveK

    return AdaptiveK(choices(most))
