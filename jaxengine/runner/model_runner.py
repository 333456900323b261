"""The executor of this process: packed batches to the device (slot records, forward, sample), and
the rows that come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array

from jaxengine.models.spec import Params
from jaxengine.parallel import expert_load
from jaxengine.runner.draft.lookup import Lookup
from jaxengine.runner.draft.verify import Drafted
from jaxengine.runner.draft_runner import DraftRunner
from jaxengine.runner.lowering import head_params
from jaxengine.runner.own_shards import AllShards, OwnShards
from jaxengine.runner.programs import Key, Programs
from jaxengine.runner.sampling_step import FIXED
from jaxengine.runner.state import DeviceState, new_state
from jaxengine.runner.warmup import draft_keys, programs_of
from jaxengine.sched.batch import Bucket
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import Int32, StepResult
from jaxengine.sched.shapes import (
    ON_DEMAND,
    ProgramKey,
    ShapeChooser,
    StepShapes,
    VerifyChooser,
    sampler_of,
)

if TYPE_CHECKING:
    from jaxengine.offload.host_pool import PagePool
    from jaxengine.offload.jobs import Done, OffloadStep
    from jaxengine.offload.layout import KVLayout
    from jaxengine.offload.transfer import DeviceTransfer


@dataclass
class Handle:
    """A step in flight: hidden states until it is sampled (of its rows and of all its tokens),
    then its output rows; and prompt log-probabilities if asked."""

    batch: Batch
    hidden: Array | Drafted
    tokens: Array | None = None
    rows: Array | None = None
    prompt: Array | None = None
    pooled: Array | None = None


class ModelRunner:
    """Owns parameters and device state. See `Executor` and `Verifier`; one thread at a time."""

    def __init__(
        self,
        params: Params,
        programs: Programs,
        step_shapes: StepShapes,
        reload: Callable[[], Params],
        shards: AllShards | OwnShards | None = None,
    ) -> None:
        """`reload` loads the parameters again, after a deep sleep. Raises the loader's errors of
        the drafter's parameters."""
        self.params = params
        self.programs = programs
        self.step_shapes = step_shapes
        self._head = head_params(params)
        self._shapes = programs.shapes.state
        self._state: DeviceState | None = new_state(self._shapes)
        self._reload = reload
        self._devices = programs.shapes.devices
        self._shards = shards or AllShards()
        self._chooser = ShapeChooser(step_shapes, self.ready, self.start)
        self._verify_chooser = VerifyChooser((), "lazy", self.ready)
        self._transfers: list[DeviceTransfer] = []  # by shard
        self._shardings: Any = None  # of the parameters, while they sleep in host memory
        self._drafts = DraftRunner(programs, programs.shapes.drafter, params, self._devices)
        self._is_one_of_many = jax.process_count() > 1
        self._all_legal: dict[int, Array] = {}  # masks by sampler rows, for steps without grammars

    # -- shapes -----------------------------------------------------------------------------

    def ready(self, key: ProgramKey) -> bool:
        """The program is compiled, and so is what the drafter runs in the same steps. "verify"
        stands for all programs of a step with drafts."""
        return all(map(self.programs.ready, programs_of(key, self.programs.drafter)))

    def start(self, key: ProgramKey) -> None:
        """Compile in the background what `ready` asks for."""
        self.programs.start(programs_of(key, self.programs.drafter))

    def choose(
        self, num_tokens: int, num_rows: int, decode_only: bool, fewest_tokens: int
    ) -> tuple[Bucket, int]:
        return self._chooser.choose(num_tokens, num_rows, decode_only, fewest_tokens)

    def open_speculation(
        self, shapes: Sequence[tuple[int, int]], lookup: tuple[int, int], warmup: str
    ) -> None:
        """See `Verifier`."""
        self.programs.lookup = Lookup(*lookup)
        overlap = self.step_shapes.overlap
        self._verify_chooser = VerifyChooser(shapes, warmup, self.ready, overlap)
        if warmup not in ON_DEMAND:
            full = warmup == "full" or (warmup == "auto" and jax.default_backend() != "cpu")
            keys = draft_keys(self.step_shapes, shapes, self.programs.drafter)
            self.programs.start(keys, urgent=full)
            if full:
                self.programs.wait()

    def choose_verify(self, num_rows: int, num_drafts: int) -> Bucket | None:
        """See `Verifier`."""
        return self._verify_chooser.choose(num_rows, num_drafts)

    # -- steps ------------------------------------------------------------------------------

    def submit(self, batch: Batch) -> Handle:
        """Dispatch a step; returns before the device is done. A masked batch is sampled later."""
        self._chooser.count(self._verify_chooser.outcome(batch.bucket))
        batch = self._shards.batch(batch)
        verifies = batch.bucket.drafts > 0
        forward = self.programs.get(Key("verify" if verifies else "forward", batch.bucket))
        assert self._state is not None, "the engine sleeps"
        kv, slots = self._state
        if batch.seeds:
            seed = self.programs.get(Key("seed"))
            for blob in batch.seeds:
                slots = seed(slots, blob)
        if verifies:
            counted = self._drafts.counted
            assert counted is not None
            drafts = self._drafts.proposed(batch, slots)
            kv, drafted = forward(self.params, kv, slots, counted.length, drafts, batch.blob)
            self._state = DeviceState(kv, slots)
            handle = Handle(batch, drafted)
        else:
            kv, output = forward(self.params, kv, slots.last_token, batch.blob)
            self._state = DeviceState(kv, slots)
            rows = output.rows[batch.sampler_rows]
            handle = Handle(batch, rows, rows if output.hidden is None else output.hidden)
        if not batch.masked:
            self._sample(handle, self._no_mask(batch.sampler_rows * (1 + batch.bucket.drafts)))
        if batch.prompt_rows:
            score = self.programs.get(Key("score", batch.bucket.tokens))
            handle.prompt = score(self._head, output.hidden, batch.prompt_targets)
            handle.prompt.copy_to_host_async()
        if batch.pool_index is not None:
            pool = self.programs.get(Key("pool", batch.bucket.tokens))
            handle.pooled = pool(output.hidden, batch.pool_index)
            handle.pooled.copy_to_host_async()
        return handle

    def sample(self, handle: Handle, mask: Int32) -> None:
        """Sample a masked batch; its forward may still run."""
        self._sample(handle, self._shards.whole(mask))

    def _sample(self, handle: Handle, mask: Int32 | Array) -> None:
        assert self._state is not None
        kv, slots = self._state
        batch = handle.batch
        if isinstance(handle.hidden, Drafted):
            accept = self.programs.get(Key("accept", batch.bucket))
            slots, self._drafts.counted, handle.rows = accept(
                self._head, slots, self._drafts.counted, handle.hidden, batch.rows_blob, mask
            )
            self._drafts.accepted(batch, handle.hidden, handle.rows)
        else:
            program = self.programs.get(self._sampler(batch))
            slots, handle.rows = program(self._head, slots, handle.hidden, batch.rows_blob, mask)
            self._drafts.sampled(batch, slots, handle.hidden, handle.tokens)
        handle.tokens = None
        self._state = DeviceState(kv, slots)
        handle.rows.copy_to_host_async()

    def _sampler(self, batch: Batch) -> Key:
        if self._is_one_of_many:  # what is ready here may not be elsewhere
            return Key("sample", batch.sampler_rows)
        return Key(*sampler_of(batch, lambda key: self.programs.ready(Key(*key))))  # type: ignore[arg-type]

    def _no_mask(self, rows: int) -> Array:
        if rows not in self._all_legal:
            words = self._shapes.slots.allow_mask.shape[1]
            shape = (self._devices.num_shards * rows, words)
            mask = np.full(shape, -1, np.int32)
            self._all_legal[rows] = self._devices.put(mask, self._devices.data)
        return self._all_legal[rows]

    def result(self, handle: Handle) -> list[StepResult]:
        """Wait for a step and bring its rows to NumPy, shard by shard."""
        batch = handle.batch
        assert handle.rows is not None, "the batch was not sampled"
        rows, size = self._shards.rows(handle.rows), batch.sampler_rows
        if batch.bucket.drafts:
            return [_verified(rows[: batch.num_rows[0]], batch)]
        results = [
            _result(rows[i * size : i * size + count], batch.want_logprobs)
            for i, count in enumerate(batch.num_rows)
        ]
        if handle.pooled is not None:
            pooled = self._shards.rows(handle.pooled).reshape(
                len(results), -1, handle.pooled.shape[1]
            )
            for result, sums, count in zip(results, pooled, batch.num_rows, strict=True):
                result.pooled = sums[:count]
        if handle.prompt is not None:
            prompt = self._shards.rows(handle.prompt)
            for shard, row, first, number in batch.prompt_rows:
                begin = shard * batch.bucket.tokens + first
                part = prompt[begin : begin + number]
                results[shard].prompt_logprobs[row] = (*_split(part[:, 1:]), part[:, 0])
        return results

    # -- KV offload -------------------------------------------------------------------------

    def open_transfers(self, pools: Sequence[PagePool], layout: KVLayout) -> None:
        """KV offload: compile the copies between the cache and the shards' host pools."""
        from jaxengine.offload.transfer import DeviceTransfer

        self._transfers = [DeviceTransfer(layout, pool) for pool in pools]
        for transfer in self._transfers[:1]:
            transfer.warmup(self._shapes.kv)
        for transfer in self._transfers[1:]:
            transfer.share_programs(self._transfers[0])

    def transfer(self, steps: Sequence[OffloadStep | None]) -> None:
        """Dispatch the shards' transfers: what is stored is read before it can be overwritten."""
        assert self._state is not None, "the engine sleeps"
        kv, slots = self._state
        for shard, step in enumerate(steps):
            if step is not None:
                first = shard * (kv[0][0].shape[0] // self._devices.num_shards)
                transfer = self._transfers[shard]
                transfer.store(kv, [job.moved(first) for job in step.stores])
                kv = transfer.load(kv, [job.moved(first) for job in step.loads])
        self._state = DeviceState(kv, slots)

    def poll_transfers(self) -> list[list[Done]]:
        """Transfers that ended since the last call, by shard."""
        return [transfer.poll() for transfer in self._transfers]

    # -- state ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Fresh device state; parameters and programs stay."""
        for transfer in self._transfers:
            transfer.reset()
        self._state = None  # first: there may be no room for two
        self._state = new_state(self._shapes)
        self._drafts.reset()

    def sleep(self, level: int) -> None:
        """1: weights move to host memory; 2: they are dropped. The KV pool is dropped."""
        for transfer in self._transfers:
            transfer.reset()
        self._state = None
        self._drafts.sleep()
        if level == 1:
            self._shardings = jax.tree.map(lambda a: a.sharding, self.params)
            self.params = jax.tree.map(np.asarray, self.params)
        else:
            self.params = {}
        self._head = {}

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        """Parameters and an empty pool are back on the device, or one of the two."""
        if weights:
            if self.params:
                self.params = jax.tree.map(jax.device_put, self.params, self._shardings)
            else:
                self.params = self._reload()
            self._head = head_params(self.params)
            self._drafts.wake_up(self.params)
        if kv_cache:
            self._state = None
            self._state = new_state(self._shapes)
        if self._head and self._state is not None:
            self.reset()

    def stats(self) -> dict[str, float]:
        """Compilations, and how many steps ran as two microbatches."""
        return {
            "num_compilations": self.programs.num_compiled,
            "compilations_after_warmup": self.programs.compiled_after_warmup,
            "warm": float(self.programs.warm),
        } | self._chooser.stats()

    def wait_warm(self) -> None:
        """All programs that were asked for are compiled. Raises what a compilation raised."""
        self.programs.wait()

    def shutdown(self) -> None:
        """No more programs are compiled, no more KV is copied."""
        for transfer in self._transfers:
            transfer.close()
        self.programs.shutdown()
        expert_load.flush()


def _result(rows: np.ndarray[Any, Any], want_logprobs: bool) -> StepResult:
    tokens = rows[:, :1]
    result = StepResult(
        token_ids=tokens,
        num_sampled=(tokens[:, 0] >= 0).astype(np.int32),
        bad_rows=rows[:, 1] > 0,
    )
    if want_logprobs:
        result.ranks = rows[:, FIXED - 1]
        result.logprob_ids, result.logprobs = _split(rows[:, FIXED:])
    return result


def _verified(rows: np.ndarray[Any, Any], batch: Batch) -> StepResult:
    """The result of a step with drafts, from output rows of `accept_rows`."""
    places = 1 + batch.bucket.drafts
    columns = rows[:, 1:].reshape(len(rows), places, -1)
    tokens = np.ascontiguousarray(columns[:, :, 0])
    result = StepResult(
        token_ids=tokens,
        num_sampled=(tokens >= 0).sum(1).astype(np.int32),
        bad_rows=columns[:, 0, 1] > 0,
        num_drafted=rows[:, 0],
    )
    if batch.want_logprobs:
        flat = columns.reshape(len(rows) * places, -1)
        ids, values = _split(flat[:, FIXED:])
        result.ranks = columns[:, :, FIXED - 1]
        result.logprob_ids = ids.reshape(len(rows), places, -1)
        result.logprobs = values.reshape(len(rows), places, -1)
    return result


def _split(part: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ids and log-probabilities from an output's [n, 2 * (1 + K)] columns."""
    width = part.shape[1] // 2
    return part[:, :width], np.ascontiguousarray(part[:, width:]).view(np.float32)
