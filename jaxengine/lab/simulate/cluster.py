"""The event loop: arrivals, the real balancer, ranks.

Time is a heap of events; nothing sleeps. Between two events a rank's state does not matter to
anybody else, so an event is one turn of a rank's step loop or one arrival.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxengine.front.ranks.balancer import Balancer, prefix_key
from jaxengine.lab.bench.datasets import BenchRequest, prompt_tokens
from jaxengine.lab.simulate.cost import CostModel
from jaxengine.lab.simulate.outcome import Outcome, RankFigures, Record
from jaxengine.lab.simulate.rank import Rank
from jaxengine.lab.simulate.tiers import HostMemory, TierConfig
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.request import Request

# What the front knows of a rank is as old as in the engine (`engine.process.STATS_INTERVAL`).
STATS_INTERVAL = 0.25


@dataclass(frozen=True)
class Cluster:
    """What is simulated. `affinity`: none | prefix | session, as --data-parallel-affinity."""

    sched_sizes: SchedulerSizes
    cost: CostModel
    ranks: int = 1
    depth: int = 2
    affinity: str = "none"
    tier: TierConfig | None = None


def simulate(
    cluster: Cluster,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int | None = None,
    seed: int = 0,
) -> Outcome:
    """Run the requests to their ends. The same arguments give the same outcome.

    A session's request comes when the one before it has ended, but not before its own time.
    max_concurrency: a client sends no more at once. Raises ValueError for settings.
    """
    return _Run(cluster, requests, max_concurrency, seed).go()


class _Run:
    def __init__(
        self,
        cluster: Cluster,
        requests: Sequence[BenchRequest],
        max_concurrency: int | None,
        seed: int,
    ) -> None:
        if cluster.ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {cluster.ranks}")
        if cluster.affinity not in ("none", "prefix", "session"):
            raise ValueError(f"affinity must be none, prefix or session, got {cluster.affinity!r}")
        self._cluster = cluster
        self._requests = requests
        self._seed = seed
        self._records = [Record(r.prompt_len, r.output_len) for r in requests]
        self._ranks: dict[int, Rank] = {}  # made with their first request
        self._balancer = Balancer(range(cluster.ranks))
        self._all_ranks = list(range(cluster.ranks))
        self._stats_at = [-STATS_INTERVAL] * cluster.ranks
        self._events: list[tuple[float, int, int, int]] = []  # time, order, rank or -1, request
        self._order = itertools.count()
        self._room = max_concurrency or len(requests)
        self._held: deque[int] = deque()  # requests that wait for room at their client
        self._next_of: dict[int, int] = {}  # the request after it in its session
        self._last_end = 0.0

    def go(self) -> Outcome:
        started: set[str] = set()
        last: dict[str, int] = {}
        for i, request in enumerate(self._requests):
            if request.session is not None and request.session in started:
                self._next_of[last[request.session]] = i
            else:
                self._push(request.arrival, -1, i)
            if request.session is not None:
                started.add(request.session)
                last[request.session] = i
        first = min((event[0] for event in self._events), default=0.0)
        while self._events:
            now, _, rank, coming = heapq.heappop(self._events)
            if rank >= 0:
                self._turn(rank, now)
            elif self._room:
                self._send(coming, now)
            else:
                self._held.append(coming)
        figures = [
            self._ranks[i].close() if i in self._ranks else RankFigures() for i in self._all_ranks
        ]
        span = max(0.0, self._last_end - first)
        return Outcome(self._records, figures, span, self._cluster.sched_sizes.max_num_seqs)

    def _push(self, time: float, rank: int, request: int = -1) -> None:
        heapq.heappush(self._events, (time, next(self._order), rank, request))

    def _send(self, i: int, now: float) -> None:
        request, record = self._requests[i], self._records[i]
        record.arrival = now
        prompt = prompt_tokens(request, self._seed)
        key = None
        if self._cluster.affinity == "session":
            key = request.session
        elif self._cluster.affinity == "prefix":
            key = prefix_key(list(prompt))
        number = self._balancer.choose(self._all_ranks, key)
        rank = self._ranks.get(number) or self._make(number)
        record.rank = number
        self._room -= 1
        self._balancer.entered(number)
        sequence = Request(
            str(i), np.asarray(prompt, np.int32), max_tokens=request.output_len, arrival_time=now
        )
        try:
            rank.add(sequence, record)
        except ValueError as error:
            record.error = str(error)
            self._ended(i, number, now)
            return
        if rank.is_idle:
            rank.is_idle = False
            self._push(now, number)

    def _make(self, number: int) -> Rank:
        c = self._cluster
        tier = HostMemory(c.tier, c.sched_sizes, c.cost) if c.tier is not None else None
        rank = self._ranks[number] = Rank(c.sched_sizes, c.cost, c.depth, tier)
        return rank

    def _turn(self, number: int, now: float) -> None:
        rank = self._ranks[number]
        again, ended = rank.turn(now)
        for name in ended:
            self._ended(int(name), number, now)
        if again is not None:
            self._push(again, number)
        if again is None or now - self._stats_at[number] >= STATS_INTERVAL:
            self._stats_at[number] = now
            scheduler = rank.scheduler
            self._balancer.update(
                number, scheduler.num_waiting, scheduler.num_running, scheduler.kv_usage
            )

    def _ended(self, i: int, rank: int, now: float) -> None:
        self._last_end = max(self._last_end, now)
        self._balancer.left(rank)
        self._room += 1
        following = self._next_of.get(i)
        if following is not None:
            self._push(max(now, self._requests[following].arrival), -1, following)
        if self._held:
            self._push(now, -1, self._held.popleft())
