"""Who is admitted next. Two orders behind one small interface."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from jaxengine.sched.request import Request


class WaitingQueue(Protocol):
    def add(self, request: Request) -> None:
        """At the end."""
        ...

    def prepend(self, request: Request) -> None:
        """Back to the front (a preempted or held-back request)."""
        ...

    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, requests: set[Request]) -> None:
        """Take these out, wherever they are."""
        ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def prepend(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, requests: set[Request]) -> None:
        self._requests = deque(r for r in self._requests if r not in requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


RankKey = tuple[int, float, str]


def rank(request: Request) -> RankKey:
    """Order of the priority policy: the lowest goes first, the highest is preempted first."""
    return request.priority, request.arrival_time, request.request_id


class PriorityQueue:
    """Lowest (priority, arrival time, id) first; the key also restores the place of a prepend."""

    def __init__(self) -> None:
        self._heap: list[tuple[RankKey, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (rank(request), request))

    def prepend(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: set[Request]) -> None:
        self._heap = [entry for entry in self._heap if entry[1] not in requests]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))


def make_queue(policy: str) -> WaitingQueue:
    """Raises ValueError for an unknown policy."""
    if policy == "fcfs":
        return FcfsQueue()
    if policy == "priority":
        return PriorityQueue()
    raise ValueError(f"policy must be fcfs or priority, got {policy!r}")
