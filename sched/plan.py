"""What the scheduler decides for one step, and what comes back. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jaxengine.sched.request import Request

Int32 = NDArray[np.int32]


@dataclass
class StepPlan:
    """Who runs how many tokens, where. Rows: decode rows first, then prefill rows.

    S rows. A decode row feeds `last_token[slot]` of the device (its value may not be known on the
    host yet), and its drafts. A prefill row feeds known tokens
    `request.token_ids[start : start + num_new]`.
    """

    step_id: int
    requests: list[Request]  # [S], row order
    slots: Int32  # [S] device slot of each row
    start: Int32  # [S] position of the row's first token (num_computed_tokens before the step)
    num_new: Int32  # [S] tokens the row feeds
    samples: NDArray[np.bool_]  # [S] False for a prefill chunk that ends before the known tokens
    num_decode: int  # rows [:num_decode] are decode rows
    num_output: Int32  # [S] output tokens the row has before this step, booked ones included
    # Requests that got a slot since the last plan (admitted or resumed): the runner resets what
    # it holds for that slot before the step.
    new_requests: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    # [S] drafts among the row's tokens (the last ones); a row with drafts samples up to 1 + drafts.
    num_drafts: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    # [S] drafts of the row are in flight: `start` and `num_output` are the most they can be, the
    # device knows how many tokens there are.
    uncertain: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    # [S] which residence of the slot the row belongs to (scheduler's own; see `SlotTable.epoch`).
    epochs: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    has_grammar: bool = False  # some sampling row is constrained
    # Some constrained row's previous token is still in flight: sample only after its update().
    pending_grammar: bool = False
    connector_meta: object = None  # what `KVConnector.build_step` gave

    @property
    def num_rows(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())


@dataclass
class StepResult:
    """What the device brought back for a plan's rows, as NumPy. M >= 1 tokens a row at most."""

    token_ids: Int32  # [S, M]
    num_sampled: Int32  # [S] valid entries of the row; 0 where `samples` is False
    bad_rows: NDArray[np.bool_] | None = (
        None  # [S] logits held NaN or nothing legal: end with error
    )
    # best `max_logprobs` plus the sampled token first, [S, 1+K]; None when no row asked. With
    # drafts [S, M, 1+K], and ranks [S, M].
    logprob_ids: Int32 | None = None
    logprobs: NDArray[np.float32] | None = None
    ranks: Int32 | None = None  # [S]
    num_drafted: Int32 | None = None  # [S] drafts that were verified; None in a step without any
    pooled: NDArray[np.float32] | None = None  # [S, D] sums of hidden states; None: nobody asked
    # per row: (ids [n, 1+K], logprobs [n, 1+K], ranks [n]) for the prompt positions
    # start+1 .. start+num_new of that row, where the row asked
    prompt_logprobs: dict[int, tuple[Int32, NDArray[np.float32], Int32]] = field(
        default_factory=dict
    )
