"""How the engine core talks to a device: submit a batch, later take its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxengine.sched.batch import Bucket
from jaxengine.sched.plan import Int32, StepResult

if TYPE_CHECKING:
    from jaxengine.offload.host_pool import PagePool
    from jaxengine.offload.jobs import Done, OffloadStep
    from jaxengine.offload.layout import KVLayout


@dataclass(frozen=True)
class Batch:
    """A packed step: everything a device needs, as plain data. A bucket with drafts has its own
    layouts (`jaxengine.sched.verify_batch`), and a mask row for each of its tokens.

    With attention data parallelism every array joins those of the shards, in order; lists of
    rows name the shard first.
    """

    bucket: Bucket
    blob: Int32  # for the forward program; layouts in `jaxengine.sched.batch`
    sampler_rows: int  # size of the sample program, of one shard
    rows_blob: Int32  # for the sample program
    num_rows: tuple[int, ...]  # by shard
    seeds: list[Int32] = field(default_factory=list)  # slot records to write before the step
    want_logprobs: bool = False
    masked: bool = False  # sampling waits for `Executor.sample` with the grammars' masks
    # (shard, row, first token, count) of rows that get prompt log-probabilities, and what to score
    prompt_rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    prompt_targets: Int32 | None = None
    pool_index: Int32 | None = None  # of embeddings: the row that each token counts for


class Executor(Protocol):
    """Inline (same process) and worker-process executors share one conformance test.

    `submit` returns at once; results come in submission order. After an exception the device
    state is gone: `reset` rebuilds it (weights and programs stay).
    """

    def choose(
        self, num_tokens: int, num_rows: int, decode_only: bool, fewest_tokens: int
    ) -> tuple[Bucket, int]:
        """The compiled shapes to pack such a step for: forward bucket and sampler rows. Of several
        shards, the largest counts; `fewest_tokens` are those of the smallest."""
        ...

    def submit(self, batch: Batch) -> Any: ...
    def sample(self, handle: Any, mask: Int32) -> None:
        """Sample a `masked` batch; `mask` [shards * sampler rows, ceil(V / 32)] has the legal
        tokens. Comes before the next submit."""
        ...

    def result(self, handle: Any) -> list[StepResult]:
        """One for each shard."""
        ...

    def open_transfers(self, pools: Sequence[PagePool], layout: KVLayout) -> None:
        """KV offload: host memory of each shard, which the device's process shares or maps."""
        ...

    def transfer(self, steps: Sequence[OffloadStep | None]) -> None:
        """Dispatch the shards' transfers, before the next submit."""
        ...

    def poll_transfers(self) -> list[list[Done]]:
        """Transfers that ended since the last call, by shard. Never waits."""
        ...

    def reset(self) -> None: ...
    def sleep(self, level: int) -> None:
        """Give device memory back: 1 keeps the weights in host memory, 2 drops them."""
        ...

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        """Weights and an empty KV pool are on the device again, or one of the two."""
        ...

    def stats(self) -> dict[str, float]: ...
    def wait_warm(self) -> None: ...
    def shutdown(self) -> None: ...


@runtime_checkable
class Verifier(Protocol):
    """An executor that can verify drafts."""

    def open_speculation(
        self, shapes: Sequence[tuple[int, int]], lookup: tuple[int, int], warmup: str
    ) -> None:
        """Compile programs for these (rows, drafts), in this order; `lookup` are the shortest and
        longest n-gram that the device looks up."""
        ...

    def choose_verify(self, num_rows: int, num_drafts: int) -> Bucket | None:
        """The smallest compiled shape that holds such a step; None when there is none yet."""
        ...
