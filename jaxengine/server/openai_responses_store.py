"""Responses that can be asked for again: in memory, the least recently used go first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_COUNT = 1000
MAX_BYTES = 256 * 1024 * 1024

_encoded = msgspec.json.Encoder().encode


@dataclass
class Job:
    """A response that is made in the background, and its events so far."""

    task: asyncio.Task[None] | None = None
    events: list[bytes] = field(default_factory=list)  # one or more whole events each
    done: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, events: bytes, done: bool = False) -> None:
        if events:
            self.events.append(events)
        self.done = done
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self) -> AsyncIterator[bytes]:
        """All events from the first to the last, as they come."""
        at = 0
        while True:
            news = self._news
            while at < len(self.events):
                at += 1
                yield self.events[at - 1]
            if self.done:
                return
            await news.wait()


@dataclass
class Stored:
    """A response object, the conversation up to and with it, and its job if it has one."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    job: Job | None = None
    streamed: bool = False  # its events are kept
    size: int = 0  # bytes, as counted by the store

    @property
    def running(self) -> bool:
        return self.job is not None and not self.job.done


class ResponseStore:
    """At most `max_count` responses of `max_bytes` together; those being made are never dropped."""

    def __init__(self, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: Stored) -> None:
        """Keep a response; one that is there already is counted anew."""
        name = stored.response["id"]
        self.drop(name)
        stored.size = len(_encoded([stored.response, stored.messages]))
        if stored.job is not None:
            stored.size += sum(map(len, stored.job.events))
        self._stored[name] = stored
        self._bytes += stored.size
        for other in list(self._stored):
            if len(self._stored) <= self._max_count and self._bytes <= self._max_bytes:
                break
            if not self._stored[other].running:
                self.drop(other)

    def get(self, name: str) -> Stored | None:
        if name in self._stored:
            self._stored.move_to_end(name)
        return self._stored.get(name)

    def drop(self, name: str) -> None:
        stored = self._stored.pop(name, None)
        if stored is not None:
            self._bytes -= stored.size
