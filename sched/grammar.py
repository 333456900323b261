"""What the scheduler and the engine ask of structured output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxengine.sched.plan import Int32


class Grammar(Protocol):
    """The matcher of one request. Its state always equals the committed output tokens.

    The scheduler holds a request back until `ready`, and calls `accept` once for every token it
    keeps. A grammar that fails to compile never gets ready: whoever compiles it aborts the request.
    """

    @property
    def ready(self) -> bool:
        """The grammar is compiled."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the request must end, where its constraint is at fault; None while all is well."""
        ...

    @property
    def terminated(self) -> bool:
        """Only an end token may follow."""
        ...

    @property
    def over(self) -> bool:
        """It allows everything from now on: it may be forgotten."""
        ...

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance. False (state unspecified) when a token is not allowed: the request fails."""
        ...

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens are allowed in a row from here; does not advance."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        ...

    def fill_bitmask(self, row: Int32) -> None:
        """Write the allowed next tokens into `row` [ceil(V / 32)]: bit v % 32 of word v // 32."""
        ...
