"""Runs packed batches on the device: seed slots, call the step program, fetch its rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxengine.executor.base import Batch
from jaxengine.models.spec import Params
from jaxengine.runner.programs import SEED, Programs
from jaxengine.runner.state import DeviceState, new_state
from jaxengine.runner.step import FIXED, StepOutput
from jaxengine.sched.batch import Bucket
from jaxengine.sched.plan import StepResult


@dataclass(frozen=True)
class Handle:
    """A step in flight."""

    batch: Batch
    output: StepOutput


class ModelRunner:
    """Owns parameters and device state. One thread at a time."""

    def __init__(
        self, params: Params, state_shapes: DeviceState, programs: Programs, buckets: list[Bucket]
    ) -> None:
        self.params = params
        self.programs = programs
        self.buckets = buckets
        self._shapes = state_shapes
        self._state = new_state(state_shapes)

    def submit(self, batch: Batch) -> Handle:
        """Dispatch a step; returns before the device is done."""
        program = self.programs.get(batch.bucket)
        state = self._state
        if batch.seeds:
            seed = self.programs.get(SEED)
            slots = state.slots
            for blob in batch.seeds:
                slots = seed(slots, blob)
            state = state._replace(slots=slots)
        self._state, output = program(self.params, state, batch.blob)
        output.rows.copy_to_host_async()
        if batch.prompt_rows and output.prompt is not None:
            output.prompt.copy_to_host_async()
        return Handle(batch, output)

    def result(self, handle: Handle) -> StepResult:
        """Wait for a step and bring its rows to NumPy."""
        batch, count = handle.batch, handle.batch.num_rows
        rows = np.asarray(handle.output.rows)[:count]
        tokens = rows[:, :1]
        result = StepResult(
            token_ids=tokens,
            num_sampled=(tokens[:, 0] >= 0).astype(np.int32),
            bad_rows=rows[:, 1] > 0,
        )
        if batch.want_logprobs:
            result.ranks = rows[:, FIXED - 1]
            result.logprob_ids, result.logprobs = _split(rows[:, FIXED:])
        if batch.prompt_rows and handle.output.prompt is not None:
            prompt = np.asarray(handle.output.prompt)
            for row, first, number in batch.prompt_rows:
                part = prompt[first : first + number]
                result.prompt_logprobs[row] = (*_split(part[:, 1:]), part[:, 0])
        return result

    def reset(self) -> None:
        """Fresh device state; parameters and programs stay."""
        self._state = new_state(self._shapes)


def _split(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities from an output's [n, 2 * (1 + K)] columns."""
    width = part.shape[1] // 2
    return part[:, :width], np.ascontiguousarray(part[:, width:]).view(np.float32)
