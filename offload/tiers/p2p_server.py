"""Gives other engines what is in this one's host memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from jaxengine.offload.counters import Counters
from jaxengine.offload.keys import OffloadKey, group_of
from jaxengine.offload.tiers.host import HostTier, State
from jaxengine.offload.tiers.p2p_messages import (
    MAX_CONTROL_BYTES,
    MAX_KEYS,
    Fetch,
    Found,
    Lookup,
    Message,
    Pages,
    Refused,
    decode,
    encode,
    page_digest,
)

log = logging.getLogger(__name__)

TURN = 0.1  # seconds; how often leases are looked at when nobody asks


class PeerServer:
    """A ROUTER socket with a thread of its own. It never waits for a client: a slow or dead one
    loses its messages, and what it had found is let go when the lease ends."""

    def __init__(
        self,
        bind: str,
        host: HostTier,
        namespace: bytes,
        page_bytes: Callable[[int], int],
        counters: Counters,
        lease: float = 30.0,
    ) -> None:
        """Raises ValueError when the address cannot be bound."""
        self._host = host
        self._namespace = namespace
        self._page_bytes = page_bytes
        self._counters = counters
        self._lease = lease
        self._leases: dict[tuple[bytes, OffloadKey], tuple[int, float]] = {}  # slot, end
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ValueError(f"p2p.bind: cannot listen on {bind}: {error}") from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-p2p-server", daemon=True)
        self._thread.start()

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        sweep = time.monotonic() + TURN
        while not self._stop.is_set():
            if self._socket.poll(int(TURN * 1000)):
                route, *frames = self._socket.recv_multipart()
                self._answer(route, frames)
            if time.monotonic() >= sweep:
                self._end_leases(time.monotonic())
                sweep = time.monotonic() + TURN
        self._end_leases(float("inf"))
        self._socket.close()

    def _answer(self, route: bytes, frames: list[bytes]) -> None:
        try:
            message = decode(frames[0] if frames else b"")
        except msgspec.DecodeError:
            self._counters.add("p2p_served_garbage")
            return
        if not isinstance(message, Lookup | Fetch):
            self._counters.add("p2p_served_garbage")
            return
        if message.namespace != self._namespace:
            self._send(route, Refused(message.number, "another model or another KV layout"))
            self._counters.add("p2p_served_refusals")
        elif len(message.keys) > MAX_KEYS:
            self._send(route, Refused(message.number, f"more than {MAX_KEYS} keys"))
        elif isinstance(message, Lookup):
            states = self._host.lookup_all(message.keys)
            for key, state in zip(message.keys, states, strict=True):
                if state is State.HIT:
                    self._keep(message.client, key)
            self._send(route, Found(message.number, bytes(states)))
        else:
            self._send_pages(route, message)

    def _send_pages(self, route: bytes, message: Fetch) -> None:
        digests: list[bytes] = []
        pages: list[bytes] = []
        for key in message.keys:
            lease = self._leases.pop((message.client, key), None)
            slots = [lease[0]] if lease else self._host.pin([key])
            if slots is None:
                digests.append(b"")
                continue
            page = self._host.pool.view(slots[0], self._page_bytes(group_of(key))).tobytes()
            self._host.unpin(slots)
            digests.append(page_digest(key, memoryview(page)))
            pages.append(page)
            self._counters.add("p2p_served_bytes", len(page))
        self._send(route, Pages(message.number, digests), pages)

    def _send(self, route: bytes, message: Message, pages: list[bytes] | None = None) -> None:
        try:
            self._socket.send_multipart([route, encode(message), *(pages or [])], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the client is gone, or reads too slowly
            log.warning("p2p: cannot answer a client: %s", error)
            self._counters.add("p2p_served_lost")

    def _keep(self, client: bytes, key: OffloadKey) -> None:
        end = time.monotonic() + self._lease
        old = self._leases.get((client, key))
        if old is not None:
            self._leases[client, key] = old[0], end
            return
        slots = self._host.pin([key])
        if slots is not None:
            self._leases[client, key] = slots[0], end

    def _end_leases(self, now: float) -> None:
        ended = [name for name, (_, end) in self._leases.items() if end <= now]
        for name in ended:
            slot, _ = self._leases.pop(name)
            self._host.unpin([slot])
        if ended and now != float("inf"):
            self._counters.add("p2p_leases_expired", len(ended))
