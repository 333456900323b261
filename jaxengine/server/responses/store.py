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
MAX_RUNNING = 256  # responses that are made in the background at one time

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


class Stored:
    """A response object, the conversation up to and with it, and its job if it has one. What is not
    written any more is kept as JSON text: as objects it would take several times its size."""

    def __init__(
        self,
        response: dict[str, Any],
        messages: list[dict[str, Any]],
        job: Job | None = None,
        streamed: bool = False,
    ) -> None:
        self.id: str = response["id"]
        self.job = job
        self.streamed = streamed  # its events are kept
        self.size = 0  # bytes, as counted by the store
        self._open: tuple[dict[str, Any], list[dict[str, Any]]] | None = (response, messages)
        self._packed = b""

    @property
    def running(self) -> bool:
        return self.job is not None and not self.job.done

    @property
    def response(self) -> dict[str, Any]:
        return self._opened()[0]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self._opened()[1]

    @messages.setter
    def messages(self, messages: list[dict[str, Any]]) -> None:
        self._open = (self.response, messages)

    def _opened(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if self._open is not None:
            return self._open
        response, messages = msgspec.json.decode(self._packed)
        return response, messages

    def pack(self) -> None:
        """Count its bytes. If its job is done it is written no more: the text alone is kept."""
        if self._open is not None:
            self._packed = _encoded(self._open)
            if not self.running:
                self._open = None
        self.size = len(self._packed)
        if self.job is not None:
            self.size += sum(map(len, self.job.events))


class ResponseStore:
    """At most `max_count` responses of `max_bytes` together. Those being made are never dropped;
    there are at most `max_running` of them."""

    def __init__(
        self,
        max_count: int = MAX_COUNT,
        max_bytes: int = MAX_BYTES,
        max_running: int = MAX_RUNNING,
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_running = max_running
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, str] = {}  # id of an output item -> of its response
        self._of: dict[str, list[str]] = {}  # id of a response -> of its output items
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def is_full(self) -> bool:
        """Whether so many responses are being made that no more may begin."""
        return sum(stored.running for stored in self._stored.values()) >= self._max_running

    def put(self, stored: Stored) -> None:
        """Keep a response; one that is there already is counted anew."""
        self.drop(stored.id)
        self._of[stored.id] = [item["id"] for item in stored.response.get("output", ())]
        self._items.update(dict.fromkeys(self._of[stored.id], stored.id))
        stored.pack()
        self._stored[stored.id] = stored
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

    def item(self, item_id: str) -> dict[str, Any] | None:
        """An output item of a stored response."""
        stored = self.get(self._items.get(item_id, ""))
        if stored is None:
            return None
        return next((item for item in stored.response["output"] if item["id"] == item_id), None)

    def drop(self, name: str) -> None:
        stored = self._stored.pop(name, None)
        if stored is not None:
            self._bytes -= stored.size
            for item_id in self._of.pop(name):
                self._items.pop(item_id, None)
