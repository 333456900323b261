"""How long sampled KV blocks stay: from being given out to being evicted, idle before that, and
between uses. Definitions follow vLLM's `--kv-cache-metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

LIFETIME, IDLE, REUSE = "lifetime", "idle_before_evict", "reuse_gap"
_MOST = 4096  # kept of each kind when nobody takes them


class Residency:
    """Every 1/share-th block that is given out is watched until it is given out again."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError for a share outside (0, 1]."""
        if not 0 < share <= 1:
            raise ValueError(f"the share of sampled KV blocks must be in (0, 1], got {share}")
        self._every = max(1, round(1 / share))
        self._clock = clock
        self._count = 0
        self._lives: dict[int, tuple[float, float]] = {}  # block: given out, last used
        self._seen = self._nothing()

    def given(self, block: int, evicted: bool) -> None:
        """`block` has a new owner; `evicted`: what it held could still have been found."""
        now = self._clock()
        life = self._lives.pop(block, None)
        if life is not None and evicted:
            self._note(LIFETIME, now - life[0])
            self._note(IDLE, now - life[1])
        self._count += 1
        if self._count % self._every == 0:
            self._lives[block] = (now, now)

    def used(self, blocks: Iterable[int]) -> None:
        """A request found its prefix in these blocks."""
        for block in blocks:
            life = self._lives.get(block)
            if life is not None:
                now = self._clock()
                self._note(REUSE, now - life[1])
                self._lives[block] = (life[0], now)

    def take(self) -> dict[str, list[float]]:
        """Seconds by kind, since the last call."""
        seen, self._seen = self._seen, self._nothing()
        return seen

    def _note(self, kind: str, seconds: float) -> None:
        if len(self._seen[kind]) < _MOST:
            self._seen[kind].append(seconds)

    @staticmethod
    def _nothing() -> dict[str, list[float]]:
        return {LIFETIME: [], IDLE: [], REUSE: []}
