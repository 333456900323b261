"""What every executor must do alike: one script of calls, and its transcript to compare."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from jaxengine.sched.executor import Batch, Executor
from jaxengine.sched.plan import Int32, StepResult

ARRAYS = [f.name for f in fields(StepResult) if f.name != "prompt_logprobs"]
Mask = Callable[[Batch], Int32]  # the legal tokens of a masked batch


def transcript(
    executor: Executor, batches: Sequence[Batch], mask: Mask, depth: int = 2
) -> list[list[StepResult]]:
    """The results of these batches on an empty device state, `depth` in flight at most."""
    executor.reset()
    results, in_flight = [], deque[Any]()
    for batch in batches:
        if len(in_flight) == depth:
            results.append(executor.result(in_flight.popleft()))
        handle = executor.submit(batch)
        if batch.masked:
            executor.sample(handle, mask(batch))
        in_flight.append(handle)
    while in_flight:
        results.append(executor.result(in_flight.popleft()))
    return results


def assert_same(one: list[list[StepResult]], other: list[list[StepResult]]) -> None:
    """Raises AssertionError that names the first difference."""
    assert len(one) == len(other), f"{len(one)} steps, {len(other)} steps"
    for step, (mine, yours) in enumerate(zip(one, other, strict=True)):
        assert len(mine) == len(yours), f"step {step}: shards"
        for shard, (a, b) in enumerate(zip(mine, yours, strict=True)):
            where = f"step {step}, shard {shard}"
            for name in ARRAYS:
                _assert_equal(getattr(a, name), getattr(b, name), f"{where}: {name}")
            assert a.prompt_logprobs.keys() == b.prompt_logprobs.keys(), f"{where}: prompt rows"
            for row, parts in a.prompt_logprobs.items():
                for mine_, yours_ in zip(parts, b.prompt_logprobs[row], strict=True):
                    _assert_equal(mine_, yours_, f"{where}: prompt row {row}")


def _assert_equal(a: Any, b: Any, what: str) -> None:
    assert (a is None) == (b is None), what
    if a is not None:
        assert a.dtype == b.dtype and np.array_equal(a, b), what
