"""How the engine core talks to a device: submit a batch, later take its result."""

from __future__ import annotations

from typing import Any, Protocol

from jaxengine.sched.plan import StepPlan, StepResult


class Executor(Protocol):
    """Inline (same process) and worker-process executors share one conformance test.

    `submit` returns at once; results come in submission order. After an exception the device
    state is gone: `reset` rebuilds it (weights and programs stay).
    """

    num_blocks: int  # size of the KV pool

    def submit(self, plan: StepPlan) -> Any: ...
    def result(self, handle: Any) -> StepResult: ...
    @property
    def alive(self) -> bool: ...
    def reset(self) -> None: ...
    def stats(self) -> dict[str, float]: ...
    def shutdown(self) -> None: ...
