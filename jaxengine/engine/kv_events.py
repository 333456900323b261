"""Publishes prefix-cache events over ZMQ, numbered, with a replay of what a subscriber missed.

PUB endpoint: [topic, sequence number, batch]; numbers are 8 bytes, big-endian, from 0. A number
that is left out was lost here. Frames, batches and replays (`kv_event_replay`) are vLLM's.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from typing import Any

import msgspec
import zmq

from jaxengine.engine.kv_event_replay import Replays, Socket, number
from jaxengine.offload.addresses import is_local, numbered
from jaxengine.offload.counters import Counters
from jaxengine.offload.seldom import SeldomLog
from jaxengine.sched.kv_events import BlockStored, KVEvent
from jaxengine.settings.kv_events import _NAME, MAX_REQUEST_BYTES, KVEventsConfig

log = logging.getLogger(__name__)

_msgpack = msgspec.msgpack.Encoder().encode
PAUSE = 0.01  # seconds; how often a client that reads slowly is tried again


class KVEventPublisher:
    """`publish` is called by one thread, the step loop's; a thread of its own does the rest."""

    records = True  # the scheduler must note what becomes of blocks

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """Bind the endpoints. Raises ValueError when one cannot be bound."""
        self.counts = Counters()
        self._seldom = SeldomLog(log)
        self._topic = config.topic.encode()
        self._rank = rank
        self._queue: queue.SimpleQueue[tuple[int, float, list[KVEvent]] | None] = (
            queue.SimpleQueue()
        )
        self._max_queue_size = config.max_queue_size
        self._left_out = 0  # batches since the last one that went into the queue
        self._next = 0  # sequence number; the thread's
        self._context: zmq.Context[Socket] = zmq.Context()
        self._closed = False
        self._broken = False
        self._replay: Replays | None = None
        self.replay_endpoint = ""
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.SNDHWM, config.hwm)
            self._pub.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)  # of subscriptions
            self.endpoint = _bind(self._pub, config.endpoint, rank)
            if config.replay_endpoint:
                router = self._context.socket(zmq.ROUTER)
                Replays.prepare(router)
                self.replay_endpoint = _bind(router, config.replay_endpoint, rank)
                self._replay = Replays(router, self._topic, config.buffer_steps, self.counts)
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
        if not events or self._closed or self._broken:
            return
        if self._queue.qsize() >= self._max_queue_size:
            self._left_out += 1
            self._drop("kv events: the queue is full, a batch is lost")
            return
        self._queue.put((self._left_out, time.time(), events))
        self._left_out = 0
        self._ring()

    def stats(self) -> dict[str, float]:
        return self.counts.snapshot()

    def close(self) -> None:
        """Send what is left and free the endpoints. Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._ring()
            self._thread.join(5)
            self._alarm.close(0)
            self._context.destroy(linger=1000)

    def _ring(self) -> None:
        try:
            self._alarm.send(b"", zmq.NOBLOCK)
        except zmq.Again:  # a thousand calls wait: the thread is awake and empties the queue
            return

    def _run(self, alarm: Socket) -> None:
        poller = zmq.Poller()
        poller.register(alarm, zmq.POLLIN)
        replay = self._replay
        if replay is not None:
            poller.register(replay.socket, zmq.POLLIN)
        timeout: int | None = None  # milliseconds
        try:
            while True:
                ready = dict(poller.poll(timeout))
                if alarm in ready:
                    alarm.recv()
                if not self._send_all():
                    return
                if replay is not None:
                    timeout = self._answer(replay, replay.socket in ready)
        except Exception:  # noqa: BLE001 - the engine goes on without its events
            log.exception("kv events are no longer published")
            self._broken = True
        finally:
            alarm.close(0)
            self._pub.close()
            if replay is not None:
                replay.socket.close()

    def _send_all(self) -> bool:
        """Send every batch of the queue; False at its end."""
        while not self._queue.empty():
            entry = self._queue.get()
            if entry is None:
                return False
            left_out, at, events = entry
            sequence = self._next + left_out
            self._next = sequence + 1
            try:
                payload = encode_batch(at, events, self._rank)
                self._pub.send_multipart([self._topic, number(sequence), payload])
            except Exception:  # noqa: BLE001 - one batch must not end all
                self._drop("kv events: a batch could not be sent", trace=True)
                continue
            if self._replay is not None:
                self._replay.keep(sequence, payload)
            self.counts.add("kv_events_published")
        return True

    def _answer(self, replay: Replays, asked: bool) -> int | None:
        """Take a request and go on with the replays. Returns how many milliseconds may pass until
        the next call; None: until something comes."""
        try:
            if asked:
                replay.take_request()
            moved = replay.go_on()
        except Exception:  # noqa: BLE001 - one request must not end the publishing
            self.counts.add("kv_events_errors")
            self._seldom.warning("error", "kv events: a replay failed", trace=True)
            moved = False
        if not replay.num_active:
            return None
        return 0 if moved else int(PAUSE * 1000)

    def _drop(self, text: str, trace: bool = False) -> None:
        self.counts.add("kv_events_dropped")
        self._seldom.warning("dropped", text, trace=trace)


def _bind(socket: Socket, endpoint: str, rank: int) -> str:
    """Listen on the rank's own endpoint. Returns what it is."""
    address = numbered(endpoint, rank)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(f"{_NAME}: cannot bind {address}: {error.strerror}") from None
    if not is_local(address):
        log.warning("kv events: whoever reaches %s can read the tokens of all prompts", address)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def encode_batch(at: float, events: list[KVEvent], rank: int) -> bytes:
    """The payload of one message, as vLLM's subscribers read it: an array of time (seconds since
    the epoch), events and rank; an event is a map by field name whose `type` names it."""
    return _msgpack([at, [_fields(event) for event in events], rank])


def _fields(event: KVEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__, **dataclasses.asdict(event)}
    if isinstance(event, BlockStored):  # there are no adapters, but subscribers want the fields
        fields["lora_id"] = fields["lora_name"] = None
    return fields
