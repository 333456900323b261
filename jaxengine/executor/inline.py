"""The executor that runs in the caller's process."""

from __future__ import annotations

from typing import Any

from jaxengine.executor.base import Batch
from jaxengine.runner.buckets import choose
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.sched.batch import Bucket
from jaxengine.sched.plan import StepResult


class InlineExecutor:
    """A `ModelRunner` behind the Executor protocol."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def choose(self, num_tokens: int, num_rows: int, decode_only: bool) -> Bucket:
        """A larger shape that is compiled beats waiting; the right one compiles meanwhile."""
        runner = self._runner
        best = choose(runner.buckets, num_tokens, num_rows, decode_only)
        if best is None:
            raise ValueError(f"no bucket holds {num_tokens} tokens in {num_rows} rows")
        if runner.programs.ready(best):
            return best
        ready = [b for b in runner.buckets if runner.programs.ready(b)]
        larger = choose(ready, num_tokens, num_rows, decode_only)
        if larger is None:
            return best
        runner.programs.start([best])
        return larger

    def submit(self, batch: Batch) -> Any:
        return self._runner.submit(batch)

    def result(self, handle: Any) -> StepResult:
        return self._runner.result(handle)

    def reset(self) -> None:
        self._runner.reset()

    def stats(self) -> dict[str, float]:
        programs = self._runner.programs
        return {
            "num_compilations": programs.num_compiled,
            "compilations_after_warmup": programs.compiled_after_warmup,
            "warm": float(programs.warm),
        }

    def wait_warm(self) -> None:
        self._runner.programs.wait()

    def shutdown(self) -> None:
        self._runner.programs.shutdown()
