"""One sequence, as the scheduler sees it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.sched.plan import Int32

if TYPE_CHECKING:
    from jaxengine.sched.grammar import Grammar
    from jaxengine.sched.slots import SlotTable


class RequestStatus(enum.IntEnum):
    """Life of a request. Everything after PREEMPTED is an end."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


class Request:
    """Token ids, counters and limits of one sequence. Identity is the object, not the id.

    While the request holds a slot its counters live in the scheduler's `SlotTable`, so that a step
    can treat all rows at once; the properties here read them there. Without a slot nothing is
    computed and nothing is booked, so only the tokens need a home of their own.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | Int32,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool = False,
        params: Any = None,
        grammar: Grammar | None = None,
        grammar_from: int = 0,
    ) -> None:
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {max_tokens}")
        self.request_id = request_id
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_token_ids = tuple(stop_token_ids)
        self.eos_token_ids = tuple(eos_token_ids)
        self.priority = priority
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.params = params
        self.grammar = grammar
        self.grammar_from = grammar_from  # the output token from which on it may forbid some

        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.slot = -1
        self.stop_length = 0  # set by Scheduler.add
        self.block_hashes: list[bytes] = []  # of full blocks, one chain
        self.spec_token_ids: list[int] = []  # drafts to verify; -1 where only the device knows
        # Tokens in flight that belong to residences before a preemption. They are delivered once,
        # or ignored when `drop_stale` is set.
        self.num_stale_output_tokens = 0
        self.drop_stale = False
        self.num_cached_tokens = 0  # prefix hit at the first admission
        self.num_external_tokens = 0  # of a connector's load in progress, then loaded
        self.num_preemptions = 0
        self.queued_time = 0.0  # monotonic seconds
        self.first_scheduled_time = 0.0

        self._tokens: Int32 = np.array(prompt_token_ids, np.int32)
        self._table: SlotTable | None = None
        self._last_computed = 0

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known on the host."""
        return int(self._table.num_tokens[self.slot]) if self._table else len(self._tokens)

    @property
    def token_ids(self) -> Int32:
        """[num_tokens] prompt and outputs. A view: copy it to keep it."""
        if self._table:
            return self._table.tokens[self.slot, : self.num_tokens]
        return self._tokens

    @property
    def output_token_ids(self) -> Int32:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens fed to the device, steps in flight included; 0 after a preemption."""
        return int(self._table.num_computed[self.slot]) if self._table else self._last_computed

    @property
    def num_output_placeholders(self) -> int:
        """Output tokens promised by steps whose result is not here yet."""
        return int(self._table.placeholders[self.slot]) if self._table else 0

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens fed by steps whose result is not here yet, stale ones included."""
        live = int(self._table.in_flight[self.slot]) if self._table else 0
        return live + self.num_stale_output_tokens

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def enter(self, table: SlotTable, slot: int) -> None:
        """Called by the table only: counters live in its row from now on."""
        self._table, self.slot = table, slot

    def leave(self) -> None:
        """Called by the table only: take the tokens along."""
        self._last_computed = self.num_computed_tokens
        self._tokens = self.token_ids.copy()
        self._table, self.slot = None, -1

    def reset_computed(self) -> None:
        """After a preemption nothing is computed any more."""
        self._last_computed = 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Add output tokens while the request holds no slot (late output of a preempted one)."""
        assert self._table is None
        self._tokens = np.append(self._tokens, np.array(token_ids, np.int32))
