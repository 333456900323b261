"""The executor that runs in the caller's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxengine.executor.nodes import LeadingRunner
from jaxengine.parallel import expert_load
from jaxengine.runner.draft.drafter import Drafter
from jaxengine.runner.draft.lookup import Lookup
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.programs import Key
from jaxengine.sched.batch import Bucket
from jaxengine.sched.buckets import Overlap, in_halves
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import Int32, StepResult
from jaxengine.sched.shapes import ON_DEMAND, ProgramKey, ShapeChooser, VerifyChooser
from jaxengine.sched.verify_batch import verify_bucket

if TYPE_CHECKING:
    from jaxengine.offload.host_pool import PagePool
    from jaxengine.offload.jobs import Done, OffloadStep
    from jaxengine.offload.layout import KVLayout


class InlineExecutor:
    """A `ModelRunner` behind the Executor protocol."""

    def __init__(
        self,
        runner: ModelRunner | LeadingRunner,
        row_sizes: tuple[int, ...],
        overlap: Overlap | None = None,
    ) -> None:
        self._runner = runner
        self._chooser = ShapeChooser(runner.buckets, row_sizes, overlap, self.ready, self.start)
        self._row_sizes, self._overlap = row_sizes, overlap
        self._verify_chooser = VerifyChooser((), "lazy", self.ready)

    def ready(self, key: ProgramKey) -> bool:
        """The program is compiled, and so is what the drafter runs in the same steps. "verify"
        stands for all programs of a step with drafts."""
        programs = self._runner.programs
        return all(map(programs.ready, _with_drafter(key, programs.drafter)))

    def start(self, key: ProgramKey) -> None:
        """Compile beside what `ready` asks for."""
        programs = self._runner.programs
        programs.start(_with_drafter(key, programs.drafter))

    def choose(
        self, num_tokens: int, num_rows: int, decode_only: bool, fewest_tokens: int
    ) -> tuple[Bucket, int]:
        return self._chooser.choose(num_tokens, num_rows, decode_only, fewest_tokens)

    def open_speculation(
        self, shapes: Sequence[tuple[int, int]], lookup: tuple[int, int], warmup: str
    ) -> None:
        """See `Verifier`."""
        programs = self._runner.programs
        programs.lookup = Lookup(*lookup)
        self._verify_chooser = VerifyChooser(shapes, warmup, self.ready, self._overlap)
        if warmup not in ON_DEMAND:
            full = warmup == "full" or (warmup == "auto" and jax.default_backend() != "cpu")
            # Notes first: they are taken after the first step already.
            steps: list[ProgramKey] = [("forward", b) for b in self._runner.buckets]
            steps += [("sample", n) for n in self._row_sizes]
            keys = [key for step in steps for key in _with_drafter(step, programs.drafter)[1:]]
            buckets = [verify_bucket(*shape) for shape in shapes]
            for bucket in buckets + in_halves(buckets, self._overlap):
                keys += _with_drafter(("verify", bucket), programs.drafter)
            programs.start(keys, urgent=full)
            if full:
                programs.wait()

    def choose_verify(self, num_rows: int, num_drafts: int) -> Bucket | None:
        """See `Verifier`."""
        return self._verify_chooser.choose(num_rows, num_drafts)

    @property
    def runner(self) -> ModelRunner | LeadingRunner:
        return self._runner

    def submit(self, batch: Batch) -> Any:
        self._chooser.count(self._verify_chooser.outcome(batch.bucket))
        return self._runner.submit(batch)

    def sample(self, handle: Any, mask: Int32) -> None:
        self._runner.sample(handle, mask)

    def result(self, handle: Any) -> list[StepResult]:
        return self._runner.result(handle)

    def open_transfers(self, pools: Sequence[PagePool], layout: KVLayout) -> None:
        self._runner.open_transfers(pools, layout)

    def transfer(self, steps: Sequence[OffloadStep | None]) -> None:
        self._runner.transfer(steps)

    def poll_transfers(self) -> list[list[Done]]:
        return self._runner.poll_transfers()

    def reset(self) -> None:
        self._runner.reset()

    def sleep(self, level: int) -> None:
        self._runner.sleep(level)

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        self._runner.wake_up(weights, kv_cache)

    def stats(self) -> dict[str, float]:
        programs = self._runner.programs
        return {
            "num_compilations": programs.num_compiled,
            "compilations_after_warmup": programs.compiled_after_warmup,
            "warm": float(programs.warm),
        } | self._chooser.stats()

    def wait_warm(self) -> None:
        self._runner.programs.wait()

    def shutdown(self) -> None:
        self._runner.close()
        expert_load.flush()


def _with_drafter(key: ProgramKey, drafter: Drafter | None) -> list[Key]:
    """The programs of a step with drafts, by ("verify", bucket), in their order; else the program
    itself, and what the drafter runs behind it."""
    kind, size = key
    if kind == "verify":
        keys = [Key("lookup" if drafter is None else "draft", size)]
        keys += [Key("verify", size), Key("accept", size)]
        if drafter is not None and drafter.layers is not None and drafter.reads_hidden:
            keys.append(Key("follow", size))
        return keys
    keys = [Key(*key)]  # type: ignore[arg-type]
    if drafter is not None and kind == "forward" and drafter.layers is not None:
        keys.append(Key("follow", size))
    if drafter is not None and kind in ("sample", "greedy") and drafter.remembers:
        keys.append(Key("remember", size))
    return keys
