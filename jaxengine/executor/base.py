"""How the engine core talks to a device: submit a batch, later take its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxengine.sched.batch import Bucket
from jaxengine.sched.plan import Int32, StepResult


@dataclass(frozen=True)
class Batch:
    """A packed plan: everything a device needs for one step, as plain data."""

    bucket: Bucket
    blob: Int32  # for the forward program; layouts in `jaxengine.sched.batch`
    sampler_rows: int  # size of the sample program
    rows_blob: Int32  # for the sample program
    num_rows: int
    seeds: list[Int32] = field(default_factory=list)  # slot records to write before the step
    want_logprobs: bool = False
    masked: bool = False  # sampling waits for `Executor.sample` with the grammars' masks
    # (row, first token, count) of rows that get prompt log-probabilities, and what to score
    prompt_rows: list[tuple[int, int, int]] = field(default_factory=list)
    prompt_targets: Int32 | None = None


class Executor(Protocol):
    """Inline (same process) and worker-process executors share one conformance test.

    `submit` returns at once; results come in submission order. After an exception the device
    state is gone: `reset` rebuilds it (weights and programs stay).
    """

    def choose(self, num_tokens: int, num_rows: int, decode_only: bool) -> tuple[Bucket, int]:
        """The compiled shapes to pack such a plan for: forward bucket and sampler rows."""
        ...

    def submit(self, batch: Batch) -> Any: ...
    def sample(self, handle: Any, mask: Int32) -> None:
        """Sample a `masked` batch; `mask` [sampler rows, ceil(V / 32)] has the legal tokens.
        Comes before the next submit."""
        ...

    def result(self, handle: Any) -> StepResult: ...
    def reset(self) -> None: ...
    def sleep(self, level: int) -> None:
        """Give device memory back: 1 keeps the weights in host memory, 2 drops them."""
        ...

    def wake_up(self) -> None:
        """Weights and an empty KV pool are on the device again."""
        ...

    def stats(self) -> dict[str, float]: ...
    def wait_warm(self) -> None: ...
    def shutdown(self) -> None: ...
