"""The executor that runs in the caller's process."""

from __future__ import annotations

from typing import Any

from jaxengine.executor.base import Batch
from jaxengine.runner.buckets import choose
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.programs import Key
from jaxengine.sched.batch import Bucket
from jaxengine.sched.plan import Int32, StepResult


class InlineExecutor:
    """A `ModelRunner` behind the Executor protocol."""

    def __init__(self, runner: ModelRunner, row_sizes: tuple[int, ...]) -> None:
        self._runner = runner
        self._row_sizes = row_sizes

    def choose(self, num_tokens: int, num_rows: int, decode_only: bool) -> tuple[Bucket, int]:
        """A larger shape that is compiled beats waiting; the right one compiles meanwhile."""
        buckets = self._runner.buckets
        best = choose(buckets, num_tokens, num_rows, decode_only)
        if best is None:
            raise ValueError(f"no bucket holds {num_tokens} tokens in {num_rows} rows")
        if not self._ready("forward", best):
            compiled = [b for b in buckets if self._ready("forward", b)]
            larger = choose(compiled, num_tokens, num_rows, decode_only)
            if larger is not None:
                self._runner.programs.start([Key("forward", best)])
                best = larger
        if best.decode_only:
            return best, best.rows
        sizes = [n for n in self._row_sizes if n >= num_rows]
        ready = [n for n in sizes if self._ready("sample", n)]
        if ready and ready[0] != sizes[0]:
            self._runner.programs.start([Key("sample", sizes[0])])
        return best, (ready or sizes)[0]

    def submit(self, batch: Batch) -> Any:
        return self._runner.submit(batch)

    def sample(self, handle: Any, mask: Int32) -> None:
        self._runner.sample(handle, mask)

    def result(self, handle: Any) -> StepResult:
        return self._runner.result(handle)

    def reset(self) -> None:
        self._runner.reset()

    def sleep(self, level: int) -> None:
        self._runner.sleep(level)

    def wake_up(self) -> None:
        self._runner.wake_up()

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

    def _ready(self, kind: Any, size: Bucket | int) -> bool:
        return self._runner.programs.ready(Key(kind, size))
