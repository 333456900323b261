"""One scheduler per attention-data-parallel shard, behind the calls of one.

A shard has its own KV pool and slots; a step has a plan from every shard that has something to
run. A request is placed once, on the shard with the least to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxengine.sched.kv_events import KVEvent, Union
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler


class ShardedScheduler:
    """What the engine core asks of its schedulers together. Planning itself goes shard by shard."""

    def __init__(self, shards: Sequence[Scheduler]) -> None:
        self.shards = list(shards)
        self._home: dict[str, Scheduler] = {}
        self._cached = Union(len(self.shards))

    def add(self, request: Request) -> None:
        """Place a request. Raises ValueError as `Scheduler.add` does."""
        if request.request_id in self._home and self._is_live(request.request_id):
            raise ValueError(f"request_id {request.request_id!r} is in use")
        best = min(self.shards, key=_load)
        best.add(request)
        self._home[request.request_id] = best
        if len(self._home) > 4 * sum(s.num_running + s.num_waiting for s in self.shards) + 64:
            self._home = {i: s for i, s in self._home.items() if i in s.state.requests}

    def _is_live(self, request_id: str) -> bool:
        return request_id in self._home[request_id].state.requests

    def abort(self, ids: Iterable[str] | None = None) -> list[Request]:
        """End these (None: all) on whichever shard they are."""
        chosen = None if ids is None else list(ids)
        return [request for shard in self.shards for request in shard.abort(chosen)]

    def has_work(self) -> bool:
        return any(shard.has_work() for shard in self.shards)

    def pause(self, mode: str = "wait") -> list[Request]:
        return [request for shard in self.shards for request in shard.pause(mode)]

    def resume(self) -> None:
        for shard in self.shards:
            shard.resume()

    @property
    def is_paused(self) -> bool:
        return self.shards[0].is_paused

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """True when every shard forgot its prefixes."""
        return all([shard.reset_prefix_cache(reset_running) for shard in self.shards])

    def on_fault(self, kv_lost: bool = True) -> list[Request]:
        return [request for shard in self.shards for request in shard.on_fault(kv_lost)]

    @property
    def num_running(self) -> int:
        return sum(shard.num_running for shard in self.shards)

    @property
    def num_waiting(self) -> int:
        return sum(shard.num_waiting for shard in self.shards)

    @property
    def num_preemptions(self) -> int:
        return sum(shard.num_preemptions for shard in self.shards)

    @property
    def prefix_queries(self) -> int:
        return sum(shard.prefix_queries for shard in self.shards)

    @property
    def prefix_hits(self) -> int:
        return sum(shard.prefix_hits for shard in self.shards)

    @property
    def kv_usage(self) -> float:
        """Mean share of owned blocks."""
        return sum(shard.kv_usage for shard in self.shards) / len(self.shards)

    def take_events(self) -> list[KVEvent]:
        """As of one cache: a block is gone when no shard has it any more."""
        events: list[KVEvent] = []
        for i, shard in enumerate(self.shards):
            events += self._cached.take(i, shard.take_events())
        return events

    def check_integrity(self) -> None:
        for shard in self.shards:
            shard.check_integrity()


def _load(shard: Scheduler) -> tuple[int, float]:
    """Waiting requests weigh as in the balancer of engines; then the fuller pool loses."""
    return 4 * shard.num_waiting + shard.num_running, shard.kv_usage
