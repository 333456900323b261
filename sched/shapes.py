"""Which compiled shapes a step runs in, decided from what is ready. No JAX: the parent of a worker
process decides for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from jaxengine.sched.batch import Bucket, takes_the_best
from jaxengine.sched.buckets import Overlap, choose
from jaxengine.sched.executor import Batch
from jaxengine.sched.verify_batch import verify_bucket

ProgramKey = tuple[str, Bucket | int]  # kind and size, as `runner.programs.Key`
Overlapped = Literal["steps", "below_threshold", "not_compiled"]  # as two microbatches, or why not


ON_DEMAND = ("lazy", "first", "greedy")  # values of `warmup` that leave the rest for later


@dataclass(frozen=True)
class StepShapes:
    """What an engine's steps are compiled for. `overlap`: when they run as two microbatches."""

    buckets: list[Bucket]  # of the forward programs
    row_sizes: tuple[int, ...]  # of the samplers, ascending
    overlap: Overlap | None = None


def sampler_of(batch: Batch, ready: Callable[[ProgramKey], bool]) -> ProgramKey:
    """The sampler of a step without drafts. A greedy step need not wait for the whole one: argmax
    alone is compiled in a sixth of the time, and gives the same tokens."""
    whole, size = ("sample", batch.sampler_rows), batch.sampler_rows
    if ready(whole) or not takes_the_best(batch.rows_blob, size):
        return whole
    return "greedy", size


class OverlapCounts:
    """Steps that ran as two microbatches, and why others did not."""

    def __init__(self) -> None:
        self._counts: dict[Overlapped, int] = dict.fromkeys(get_args(Overlapped), 0)

    def add(self, outcome: Overlapped) -> None:
        self._counts[outcome] += 1

    def stats(self) -> dict[str, float]:
        """Names and values for `EngineStats.extra`."""
        return {
            ("dbo_steps" if name == "steps" else f"dbo_off_{name}"): float(count)
            for name, count in self._counts.items()
        }


class VerifyChooser:
    """Which shape a step with drafts runs in."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        warmup: str,
        ready: Callable[[ProgramKey], bool],
        overlap: Overlap | None = None,
    ) -> None:
        """`shapes` are (rows, drafts). `ready(("verify", bucket))`: all that a step of the bucket
        runs is compiled; not asked when `warmup` is lazy."""
        self._lazy = warmup in ON_DEMAND
        self._ready = ready
        self._overlap = overlap
        self._outcome: Overlapped | None = None  # of the shape chosen last, until it is run
        buckets = (verify_bucket(*shape) for shape in shapes)
        self._buckets = sorted(buckets, key=lambda b: (b.tokens, b.rows))

    def choose(self, num_rows: int, num_drafts: int) -> Bucket | None:
        """See `Verifier.choose_verify`."""
        fits = (b for b in self._buckets if b.rows >= num_rows and b.drafts >= num_drafts)
        best = next((b for b in fits if self._is_ready(b)), None)
        if best is None or self._overlap is None:
            return best
        halves = replace(best, dbo=True)
        if not self._overlap.wants(num_rows * (1 + best.drafts), best.decode_only):
            self._outcome = "below_threshold"
        elif not self._is_ready(halves):
            self._outcome = "not_compiled"
        else:
            self._outcome = "steps"
            return halves
        return best

    def _is_ready(self, bucket: Bucket) -> bool:
        return self._lazy or self._ready(("verify", bucket))

    def outcome(self, bucket: Bucket) -> Overlapped | None:
        """What became of overlap in a step that runs in the bucket chosen last, told once. A shape
        that was chosen may be dropped again: the step waits, or no row has a draft."""
        outcome, self._outcome = self._outcome, None
        return outcome if bucket.drafts else None


class ShapeChooser:
    """A larger shape that is compiled beats waiting; the right one compiles meanwhile."""

    def __init__(
        self,
        shapes: StepShapes,
        ready: Callable[[ProgramKey], bool],
        start: Callable[[ProgramKey], None],
    ) -> None:
        """`ready`: is the program compiled; `start`: compile it beside."""
        self._buckets = shapes.buckets
        self._row_sizes = shapes.row_sizes
        self._overlap = shapes.overlap
        self._ready = ready
        self._start = start
        self._overlapped = OverlapCounts()

    def choose(
        self, num_tokens: int, num_rows: int, decode_only: bool, fewest_tokens: int
    ) -> tuple[Bucket, int]:
        """Forward bucket and sampler rows; see `Executor.choose`. Raises ValueError when no
        bucket is large enough."""
        best = choose(self._buckets, num_tokens, num_rows, decode_only)
        if best is None:
            raise ValueError(f"no bucket holds {num_tokens} tokens in {num_rows} rows")
        halves = self._in_halves(best, fewest_tokens)
        if halves is not None:
            return halves, self._sampler_rows(halves, num_rows)
        if not self._ready(("forward", best)):
            compiled = [b for b in self._buckets if self._ready(("forward", b))]
            larger = choose(compiled, num_tokens, num_rows, decode_only)
            if larger is not None:
                self._start(("forward", best))
                best = larger
        return best, self._sampler_rows(best, num_rows)

    def count(self, outcome: Overlapped | None) -> None:
        """A step in a shape that was chosen elsewhere."""
        if outcome is not None:
            self._overlapped.add(outcome)

    def stats(self) -> dict[str, float]:
        """Counters of dual-batch overlap; empty where it is off."""
        return {} if self._overlap is None else self._overlapped.stats()

    def _in_halves(self, bucket: Bucket, fewest_tokens: int) -> Bucket | None:
        """The program of two microbatches, when every shard has tokens enough for it."""
        if self._overlap is None:
            return None
        halves = replace(bucket, dbo=True)
        if not self._overlap.wants(fewest_tokens, bucket.decode_only):
            self._overlapped.add("below_threshold")
        elif not self._ready(("forward", halves)) and self._ready(("forward", bucket)):
            self._start(("forward", halves))
            self._overlapped.add("not_compiled")
        else:
            self._overlapped.add("steps")
            return halves
        return None

    def _sampler_rows(self, best: Bucket, num_rows: int) -> int:
        if best.decode_only:
            return best.rows
        sizes = [n for n in self._row_sizes if n >= num_rows]
        ready = [n for n in sizes if self._ready(("sample", n))]
        if ready and ready[0] != sizes[0]:
            self._start(("sample", sizes[0]))
        return (ready or sizes)[0]
