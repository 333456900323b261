"""Publishes prefix-cache events over ZMQ, numbered, with a replay of what a subscriber missed.

PUB endpoint: [topic, sequence number, batch]; numbers are 8 bytes, big-endian, from 0 without
gaps; a batch is a msgpack `EventBatch`. Replay (ROUTER) endpoint: send [b"", number] from a DEALER
(a REQ socket adds the empty frame itself) and get [b"", number, batch] for each batch from that
number on that is still held, then [b"", -1, b""].
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import zmq

from jaxengine.sched.kv_events import KVEvent, ReplayBuffer

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
_NAME = "kv_events_config"
_ALIASES = {"enable_kv_cache_events": "enable"}
_Socket = zmq.Socket[bytes]


@dataclass(frozen=True)
class KVEventsConfig:
    """Settings of the publisher. Port numbers are raised by the data-parallel rank."""

    enable: bool = False
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches held for replay
    hwm: int = 100_000  # batches that wait for one slow subscriber; more are lost to it
    topic: str = ""


def parse_kv_events_config(value: str | Mapping[str, Any] | None) -> KVEventsConfig:
    """From JSON text or a dict. Raises ValueError naming the key at fault."""
    if value is None:
        return KVEventsConfig()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{_NAME} is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{_NAME} must be a JSON object, got {type(value).__name__}")
    given = {_ALIASES.get(key, key): item for key, item in value.items()}
    if given.pop("publisher", "zmq") not in ("zmq", None):
        raise ValueError(f'{_NAME}.publisher must be "zmq"')
    defaults = KVEventsConfig()
    known = {f.name for f in fields(defaults)}
    for key, item in given.items():
        if key not in known:
            raise ValueError(f"{_NAME}.{key} is not known; known are {', '.join(sorted(known))}")
        default = getattr(defaults, key)
        kind = str if default is None else type(default)
        if key == "replay_endpoint" and item is None:
            continue
        if type(item) is not kind:
            raise ValueError(f"{_NAME}.{key} must be {kind.__name__}, got {item!r}")
        if isinstance(item, int) and item < 1 and kind is int:
            raise ValueError(f"{_NAME}.{key} must be at least 1, got {item}")
    return KVEventsConfig(**given)


class KVEventPublisher:
    """`publish` is called by one thread, the step loop's; a thread of its own does the rest."""

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """Bind the endpoints. Raises ValueError when one cannot be bound."""
        self._topic = config.topic.encode()
        self._buffer = ReplayBuffer(config.buffer_steps, rank)
        self._queue: queue.SimpleQueue[list[KVEvent] | None] = queue.SimpleQueue()
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._closed = False
        self._broken = False
        self._replay: _Socket | None = None
        try:
            self._pub = self._bind(zmq.PUB, config.endpoint, rank, config.hwm)
            if config.replay_endpoint:
                self._replay = self._bind(zmq.ROUTER, config.replay_endpoint, rank, 0)
            alarm = self._context.socket(zmq.PAIR)
            alarm.bind("inproc://events")
            self._alarm = self._context.socket(zmq.PAIR)
            self._alarm.connect("inproc://events")
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(
            target=self._run, args=(alarm,), name="kv-events", daemon=True
        )
        self._thread.start()

    def publish(self, events: list[KVEvent]) -> None:
        """Send the events of one step as one batch. Never blocks; no events, no batch."""
        if events and not (self._closed or self._broken):
            self._queue.put(events)
            self._ring()

    def close(self) -> None:
        """Send what is left and free the endpoints. Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._ring()
            self._thread.join(5)
            self._alarm.close(0)
            self._context.destroy(linger=1000)

    def _bind(self, kind: int, endpoint: str, rank: int, hwm: int) -> _Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, hwm)  # 0 = no limit: a replay is never cut short
        try:
            socket.bind(_of_rank(endpoint, rank))
        except zmq.ZMQError as error:
            raise ValueError(f"{_NAME}: cannot bind {endpoint}: {error.strerror}") from None
        return socket

    def _ring(self) -> None:
        try:
            self._alarm.send(b"", zmq.NOBLOCK)
        except zmq.Again:  # a thousand calls wait: the thread is awake and empties the queue
            return

    def _run(self, alarm: _Socket) -> None:
        poller = zmq.Poller()
        poller.register(alarm, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if alarm in ready:
                    alarm.recv()
                if not self._send_all():
                    return
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
        except Exception:  # noqa: BLE001 - the engine goes on without its events
            log.exception("kv events are no longer published")
            self._broken = True
        finally:
            alarm.close(0)
            self._pub.close()
            if self._replay is not None:
                self._replay.close()

    def _send_all(self) -> bool:
        """Send every batch of the queue; False at its end."""
        while not self._queue.empty():
            events = self._queue.get()
            if events is None:
                return False
            sequence, batch = self._buffer.append(events)
            self._pub.send_multipart([self._topic, _number(sequence), _encode(batch)])
        return True

    def _answer(self, replay: _Socket) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("kv events: a replay request of %d frames is ignored", len(frames))
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        for sequence, batch in self._buffer.since(start):
            replay.send_multipart([client, b"", _number(sequence), _encode(batch)])
        replay.send_multipart([client, b"", END, b""])


_encode = msgspec.msgpack.Encoder().encode


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def _of_rank(endpoint: str, rank: int) -> str:
    """Each rank its own endpoint: the port plus the rank, or the name with the rank."""
    if rank == 0:
        return endpoint
    head, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdecimal():
        return f"{head}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"
