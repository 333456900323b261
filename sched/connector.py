"""What the scheduler asks of a KV source outside the pool (host memory, disk, another engine)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from jaxengine.sched.plan import StepPlan
    from jaxengine.sched.request import Request


class LoadResult(NamedTuple):
    """A load that ended. `num_tokens` of what was asked are really there (less after a failure)."""

    request_id: str
    num_tokens: int


class KVConnector(Protocol):
    """Scheduler side of a KV source. Per request at most one load, or any number of stores.

    Loads are asynchronous: the request holds its slot and blocks, runs no step, and its blocks
    are registered in the prefix cache only when the load has ended. An aborted request keeps its
    blocks until then, because the transfer still writes into them.
    """

    def on_new_request(self, request: Request) -> None:
        """The request was queued; a good time to start looking up."""
        ...

    def matched_tokens(self, request: Request, num_local: int) -> int | None:
        """Tokens it can load behind the first `num_local`; None = ask again in the next step."""
        ...

    def after_alloc(
        self, request: Request, block_ids: list[list[int]], num_local: int, num_external: int
    ) -> None:
        """Blocks were given: `block_ids[group]` is the whole block table of the request.

        Starts the load of tokens num_local .. num_local + num_external; called with 0 too.
        """
        ...

    def build_step(self, plan: StepPlan) -> object:
        """End of schedule(): opaque data for the device side, goes into `plan.connector_meta`.

        Transfers that read blocks which the plan gave to new owners are dispatched before its
        forward pass.
        """
        ...

    def take_finished_loads(self) -> list[LoadResult]:
        """Loads that ended since the last call."""
        ...

    def request_finished(self, request: Request, block_ids: list[list[int]]) -> None:
        """The request ended and its blocks are about to be free."""
        ...

    def reset_cache(self) -> bool:
        """Forget everything stored. False when it cannot now."""
        ...

    def on_fault(self) -> None:
        """The device state is lost: forget every transfer in flight."""
        ...
