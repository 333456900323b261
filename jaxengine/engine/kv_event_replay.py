"""Batches that are held for subscribers who missed some, and the answers to those who ask.

A request is [b"", number], the answer [b"", topic, number, batch] for each batch from that number
on, then [b"", b"", -1, b""]: numbers are 8 bytes, big-endian. A replay goes on as its client reads.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from dataclasses import dataclass

import zmq

from jaxengine.offload.counters import Counters
from jaxengine.offload.seldom import SeldomLog
from jaxengine.settings.kv_events import MAX_REQUEST_BYTES

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
MAX_REPLAYS = 64  # clients that are answered at once
WAITING = 64  # batches that wait in a client's queue
STALL = 30.0  # seconds; a client that takes nothing for so long gets no more
TURN = 64  # batches sent before live events are looked at again

Socket = zmq.Socket[bytes]


def number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


@dataclass
class _Replay:
    """Where one client is."""

    next: int
    moved: float  # when it last took something


class Replays:
    """Used by the publisher's thread. A client has one replay: a new request takes the place of
    the one that is under way."""

    def __init__(self, socket: Socket, topic: bytes, max_batches: int, counts: Counters) -> None:
        """socket: a bound ROUTER that `prepare` has seen."""
        self.socket = socket
        self._topic = topic
        self._held: deque[tuple[int, bytes]] = deque(maxlen=max_batches)
        self._active: dict[bytes, _Replay] = {}  # by client
        self._counts = counts
        self._seldom = SeldomLog(log)

    @staticmethod
    def prepare(socket: Socket) -> None:
        """Limits that hold from the first connection on."""
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.SNDHWM, WAITING)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error, not a loss
        socket.setsockopt(zmq.TCP_MAXRT, int(STALL * 1000))

    @property
    def num_active(self) -> int:
        return len(self._active)

    def keep(self, sequence: int, payload: bytes) -> None:
        """Hold a batch that was published; the oldest goes."""
        self._held.append((sequence, payload))

    def take_request(self) -> None:
        """Read one request. Its replay begins with the next `go_on`."""
        client, *frames = self.socket.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            self._counts.add("kv_events_bad_requests")
            text = "kv events: a replay request of %d frames is ignored"
            self._seldom.warning("request", text, len(frames))
        elif client not in self._active and len(self._active) >= MAX_REPLAYS:
            self._counts.add("kv_events_replays_refused")
            text = "kv events: %d replays are under way, one more is refused"
            self._seldom.warning("refused", text, MAX_REPLAYS)
        else:
            start = int.from_bytes(frames[1], "big")
            self._active[client] = _Replay(start, time.monotonic())

    def go_on(self) -> bool:
        """Send to every client what its queue has room for, a turn's share at most. Whether any
        took something."""
        moved = False
        for client, replay in list(self._active.items()):
            try:
                for _ in range(TURN):
                    ended = self._send_next(client, replay)
                    replay.moved, moved = time.monotonic(), True
                    if ended:
                        del self._active[client]
                        break
            except zmq.Again:  # it reads slowly
                if time.monotonic() >= replay.moved + STALL:
                    self._give_up(client)
            except zmq.ZMQError:  # it is gone
                self._give_up(client)
        return moved

    def _send_next(self, client: bytes, replay: _Replay) -> bool:
        """Send a batch, or the end."""
        at = bisect.bisect_left(self._held, replay.next, key=lambda entry: entry[0])
        if at == len(self._held):
            self._send(client, b"", END, b"")
            return True
        sequence, payload = self._held[at]
        self._send(client, self._topic, number(sequence), payload)
        self._counts.add("kv_events_replayed")
        replay.next = sequence + 1
        return False

    def _send(self, client: bytes, *frames: bytes) -> None:
        self.socket.send_multipart([client, b"", *frames], zmq.NOBLOCK)

    def _give_up(self, client: bytes) -> None:
        del self._active[client]
        self._counts.add("kv_events_replays_lost")
        self._seldom.warning("lost", "kv events: a subscriber left its replay unread")
