"""Counts of programs that XLA compiled and of those that came from the cache on disk."""

from __future__ import annotations

import jax

_MISS, _HIT = "/jax/compilation_cache/cache_misses", "/jax/compilation_cache/cache_hits"


class CacheCounts:
    """Counts of this process from now on. Any thread may compile."""

    def __init__(self) -> None:
        self.compiled = 0
        self.from_cache = 0
        jax.monitoring.register_event_listener(self._heard)

    def _heard(self, event: str, **_: str | int) -> None:
        if event == _MISS:
            self.compiled += 1
        elif event == _HIT:
            self.from_cache += 1

    def __str__(self) -> str:
        return f"{self.compiled} compiled, {self.from_cache} from the cache"
