"""The executor that runs in the caller's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxengine.executor.base import Batch
from jaxengine.executor.choice import ShapeChooser
from jaxengine.executor.nodes import LeadingRunner
from jaxengine.parallel import expert_load
from jaxengine.runner.buckets import Overlap
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.programs import Key, Kind
from jaxengine.sched.batch import Bucket
from jaxengine.sched.plan import Int32, StepResult
from jaxengine.sched.verify_batch import verify_bucket
from jaxengine.speculate.drafter import Drafter
from jaxengine.speculate.lookup import Lookup

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
        programs = runner.programs
        self._chooser = ShapeChooser(
            runner.buckets,
            row_sizes,
            overlap,
            ready=lambda key: all(map(programs.ready, _with_notes(key, programs.drafter))),
            start=lambda key: programs.start(_with_notes(key, programs.drafter)),
        )
        self._row_sizes = row_sizes
        self._verify_buckets: list[Bucket] = []
        self._lazy = False

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
        self._lazy = warmup == "lazy"
        self._verify_buckets = sorted(
            (verify_bucket(*shape) for shape in shapes), key=lambda b: (b.tokens, b.rows)
        )
        if not self._lazy:
            full = warmup == "full" or (warmup == "auto" and jax.default_backend() != "cpu")
            buckets = [verify_bucket(*shape) for shape in shapes]
            # Notes first: they are taken after the first step already.
            plain = [Key("forward", b) for b in self._runner.buckets]
            plain += [Key("sample", n) for n in self._row_sizes]
            keys = [key for of in plain for key in _with_notes(of, programs.drafter)[1:]]
            keys += [Key(kind, b) for b in buckets for kind in _kinds(programs.drafter)]
            programs.start(keys, urgent=full)
            if full:
                programs.wait()

    def choose_verify(self, num_rows: int, num_drafts: int) -> Bucket | None:
        """See `Verifier`."""
        fits = [b for b in self._verify_buckets if b.rows >= num_rows and b.drafts >= num_drafts]
        if self._lazy:
            return fits[0] if fits else None
        programs = self._runner.programs
        kinds = _kinds(programs.drafter)
        ready = (b for b in fits if all(programs.ready(Key(kind, b)) for kind in kinds))
        return next(ready, None)

    @property
    def runner(self) -> ModelRunner | LeadingRunner:
        return self._runner

    def submit(self, batch: Batch) -> Any:
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

    def wake_up(self) -> None:
        self._runner.wake_up()

    def stats(self) -> dict[str, float]:
        programs = self._runner.programs
        return {
            "num_compilations": programs.num_compiled,
            "compilations_after_warmup": programs.compiled_after_warmup,
            "warm": float(programs.warm),
        } | self._chooser.figures()

    def wait_warm(self) -> None:
        self._runner.programs.wait()

    def shutdown(self) -> None:
        self._runner.close()
        expert_load.flush()


def _kinds(drafter: Drafter | None) -> tuple[Kind, ...]:
    """The programs of a step with drafts."""
    if drafter is None:
        return "lookup", "verify", "accept"
    if drafter.layers is not None and drafter.reads_hidden:
        return "draft", "verify", "accept", "follow"
    return "draft", "verify", "accept"


def _with_notes(key: tuple[str, Bucket | int], drafter: Drafter | None) -> list[Key]:
    """A program of steps without drafts, and what the drafter runs behind it."""
    keys = [Key(*key)]  # type: ignore[arg-type]
    if drafter is not None and key[0] == "forward" and drafter.layers is not None:
        keys.append(Key("follow", key[1]))
    if drafter is not None and key[0] == "sample" and drafter.remembers:
        keys.append(Key("remember", key[1]))
    return keys
