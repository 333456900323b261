"""How many requests may wait, and what a caller hears when there are too many."""

from __future__ import annotations

from jaxengine.config import SchedulerConfig


class OverloadedError(RuntimeError):
    """Too many requests wait already; try again later (HTTP 503)."""


class ShuttingDownError(RuntimeError):
    """The engine takes no new requests, or had to end a running one, because it shuts down."""


class UnavailableError(RuntimeError):
    """No engine, or not the chosen one, can take requests now; try again later (HTTP 503)."""


class WaitingRoom:
    """Sequences without a first output yet, and the tokens of their prompts: a request counts as
    its n. One event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_requests = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self.num_requests = 0
        self.num_tokens = 0

    def check(self, prompt_len: int) -> None:
        """Raises OverloadedError with the numbers. An empty room takes any prompt, and a room that
        is not full all sequences of a request."""
        if self._max_requests is not None and self.num_requests >= self._max_requests:
            raise OverloadedError(
                f"{self.num_requests} requests wait already (the limit is {self._max_requests})"
            )
        total = self.num_tokens + prompt_len
        if self._max_tokens is not None and self.num_requests and total > self._max_tokens:
            raise OverloadedError(
                f"{self.num_tokens} prompt tokens wait already (the limit is {self._max_tokens})"
            )

    def enter(self, prompt_len: int) -> None:
        self.num_requests += 1
        self.num_tokens += prompt_len

    def leave(self, prompt_len: int) -> None:
        self.num_requests -= 1
        self.num_tokens -= prompt_len
