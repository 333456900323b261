"""Runs packed batches on the device: seed slots, forward, sample, fetch the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxengine.executor.base import Batch
from jaxengine.models.spec import Params
from jaxengine.runner.programs import Key, Programs, head_params
from jaxengine.runner.sampling_step import FIXED
from jaxengine.runner.state import DeviceState, new_state
from jaxengine.sched.batch import Bucket
from jaxengine.sched.plan import StepResult


@dataclass(frozen=True)
class Handle:
    """A step in flight: its output rows, and prompt log-probabilities if asked."""

    batch: Batch
    rows: Array
    prompt: Array | None


class ModelRunner:
    """Owns parameters and device state. One thread at a time."""

    def __init__(
        self, params: Params, state_shapes: DeviceState, programs: Programs, buckets: list[Bucket]
    ) -> None:
        self.params = params
        self.programs = programs
        self.buckets = buckets
        self._head = head_params(params)
        self._shapes = state_shapes
        self._state = new_state(state_shapes)

    def submit(self, batch: Batch) -> Handle:
        """Dispatch a step; returns before the device is done."""
        forward = self.programs.get(Key("forward", batch.bucket))
        sample = self.programs.get(Key("sample", batch.sampler_rows))
        kv, slots = self._state
        if batch.seeds:
            seed = self.programs.get(Key("seed"))
            for blob in batch.seeds:
                slots = seed(slots, blob)
        kv, output = forward(self.params, kv, slots.last_token, batch.blob)
        hidden = output.rows[batch.sampler_rows]
        slots, rows = sample(self._head, slots, hidden, batch.rows_blob)
        self._state = DeviceState(kv, slots)
        rows.copy_to_host_async()
        prompt = None
        if batch.prompt_rows:
            score = self.programs.get(Key("score", batch.bucket.tokens))
            prompt = score(self._head, output.hidden, batch.prompt_targets)
            prompt.copy_to_host_async()
        return Handle(batch, rows, prompt)

    def result(self, handle: Handle) -> StepResult:
        """Wait for a step and bring its rows to NumPy."""
        batch = handle.batch
        rows = np.asarray(handle.rows)[: batch.num_rows]
        tokens = rows[:, :1]
        result = StepResult(
            token_ids=tokens,
            num_sampled=(tokens[:, 0] >= 0).astype(np.int32),
            bad_rows=rows[:, 1] > 0,
        )
        if batch.want_logprobs:
            result.ranks = rows[:, FIXED - 1]
            result.logprob_ids, result.logprobs = _split(rows[:, FIXED:])
        if handle.prompt is not None:
            prompt = np.asarray(handle.prompt)
            for row, first, number in batch.prompt_rows:
                part = prompt[first : first + number]
                result.prompt_logprobs[row] = (*_split(part[:, 1:]), part[:, 0])
        return result

    def reset(self) -> None:
        """Fresh device state; parameters and programs stay."""
        self._state = new_state(self._shapes)


def _split(part: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ids and log-probabilities from an output's [n, 2 * (1 + K)] columns."""
    width = part.shape[1] // 2
    return part[:, :width], np.ascontiguousarray(part[:, width:]).view(np.float32)
