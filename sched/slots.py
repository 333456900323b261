"""The counters of every resident request, as NumPy arrays indexed by slot.

A request that owns KV blocks owns a slot: its row in these arrays, in the block tables and in
the device state. Almost every row of almost every step is a plain decode row, so the scheduler
does its arithmetic on whole columns (see `rows.py`) and touches Python only for exceptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxengine.sched.plan import Int32

if TYPE_CHECKING:
    from jaxengine.sched.request import Request

Index = NDArray[np.intp]
Bool = NDArray[np.bool_]


class SlotTable:
    """Counters and token history of resident requests. Columns [num_slots]; counts in tokens."""

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        def zeros() -> Int32:
            return np.zeros(num_slots, np.int32)

        self.num_prompt = zeros()
        self.num_tokens = zeros()  # prompt and outputs known on the host
        self.num_computed = zeros()  # fed to the device, in-flight steps included
        self.placeholders = zeros()  # output tokens promised by steps in flight, drafts included
        self.pending = zeros()  # sampling steps in flight
        self.in_flight = zeros()  # tokens fed by steps in flight (of this residence)
        self.stop_length = zeros()  # the request ends when num_tokens gets here
        self.num_blocks = zeros()  # entries of the block table in use
        self.num_registered = zeros()  # blocks whose hash was considered for the prefix cache
        self.num_drafts = zeros()  # drafts to verify in the next step
        self.cohort = zeros()  # which turn of a pipeline plans it
        self.num_scheduled = zeros()  # scratch of schedule(): tokens given in this step
        # A new number at every change of owner: a plan's row is alive iff its epoch still fits.
        self.epoch = zeros()
        self.sampled = np.zeros(num_slots, np.bool_)  # the device holds this residence's last token
        self.has_grammar = np.zeros(num_slots, np.bool_)
        self.grammar_from = zeros()  # output tokens that no mask is needed for
        self.stop_ids: Int32 = np.full((num_slots, 4), -1, np.int32)  # EOS and stop ids, -1 padded
        # np.zeros commits memory only where rows are really written.
        self.tokens: Int32 = np.zeros((num_slots, max_model_len), np.int32)
        self.free = list(range(num_slots - 1, -1, -1))
        self.owner: list[Request | None] = [None] * num_slots

    @property
    def num_slots(self) -> int:
        return len(self.owner)

    def attach(self, request: Request, stop_length: int) -> int:
        """Give `request` a free slot (there must be one). Returns the slot."""
        slot = self.free.pop()
        tokens = request.token_ids
        self.owner[slot] = request
        self.epoch[slot] += 1
        for column in (
            self.num_computed,
            self.placeholders,
            self.pending,
            self.in_flight,
            self.num_blocks,
            self.num_registered,
            self.num_drafts,
            self.num_scheduled,
            self.sampled,
        ):
            column[slot] = 0
        self.num_prompt[slot] = request.num_prompt_tokens
        self.num_tokens[slot] = len(tokens)
        self.stop_length[slot] = stop_length
        self.has_grammar[slot] = request.grammar is not None
        self.grammar_from[slot] = request.grammar_from
        self.tokens[slot, : len(tokens)] = tokens
        self._set_stop_ids(slot, (*request.eos_token_ids, *request.stop_token_ids))
        request.enter(self, slot)
        return slot

    def detach(self, request: Request) -> None:
        """Take the slot back; the request keeps its tokens. Its rows in flight become stale."""
        slot = request.slot
        request.leave()
        self.owner[slot] = None
        self.epoch[slot] += 1
        self.free.append(slot)

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            wider = np.full((self.num_slots, 2 * len(ids)), -1, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids
