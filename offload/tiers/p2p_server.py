"""Gives other engines what is in this one's host memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq

from jaxengine.offload.addresses import is_local
from jaxengine.offload.counters import Counters
from jaxengine.offload.keys import OffloadKey, group_of
from jaxengine.offload.seldom import SeldomLog
from jaxengine.offload.tiers.host import HostTier, State
from jaxengine.offload.tiers.p2p_leases import Leases
from jaxengine.offload.tiers.p2p_messages import (
    MAX_ANSWER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_KEYS,
    BadMessage,
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
WAITING = 4  # answers that may wait for one connection
MAX_UNSENT_BYTES = 2**30  # of pages that clients have asked for and not yet taken, all together
STALL = 30.0  # seconds; a connection that takes nothing for so long is closed


class PeerServer:
    """A ROUTER socket with a thread of its own. It never waits for a client: a slow or dead one
    loses its messages, and what it had found is let go when the lease ends. Nothing that a client
    sends ends the thread, or makes it hold more than MAX_UNSENT_BYTES of pages."""

    def __init__(
        self,
        bind: str,
        host: HostTier,
        namespace: bytes,
        page_bytes: Callable[[int], int],
        counters: Counters,
        lease: float = 30.0,
        max_unsent: int = MAX_UNSENT_BYTES,
        stall: float = STALL,
    ) -> None:
        """Raises ValueError when the address cannot be bound."""
        self._host = host
        self._namespace = namespace
        self._page_bytes = page_bytes
        self._counters = counters
        self._seldom = SeldomLog(log)
        self._leases = Leases(host, lease, counters)
        self._max_unsent = max_unsent
        self._unsent: list[tuple[zmq.MessageTracker, int]] = []  # answers with their bytes
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.copy_threshold = 0  # type: ignore[assignment]  # small pages are tracked, too
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, WAITING)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be sent is an error
        self._socket.setsockopt(zmq.TCP_MAXRT, int(stall * 1000))
        self._socket.setsockopt(zmq.IPV6, int("[" in bind))
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ValueError(f"p2p.bind: cannot listen on {bind}: {error}") from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if not is_local(bind):
            log.warning("p2p: whoever reaches %s can read the KV of cached prompts", bind)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-p2p-server", daemon=True)
        self._thread.start()

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def unsent_bytes(self) -> int:
        """Bytes of pages that no client has taken yet."""
        return sum(size for tracker, size in self._unsent if not tracker.done)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        sweep = time.monotonic() + TURN
        while not self._stop.is_set():
            try:
                if self._socket.poll(int(TURN * 1000)):
                    route, *frames = self._socket.recv_multipart()
                    self._answer(route, frames)
            except zmq.ContextTerminated:  # the process ends
                break
            except Exception:  # noqa: BLE001  one request must not end the service
                self._counters.add("p2p_served_errors")
                self._seldom.warning("error", "p2p: a request failed", trace=True)
            if time.monotonic() >= sweep:
                self._leases.end(time.monotonic())
                sweep = time.monotonic() + TURN
        self._leases.end_all()
        self._socket.close()

    def _answer(self, route: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise BadMessage(f"{len(frames)} frames")
            message = decode(frames[0])
            if not isinstance(message, Lookup | Fetch):
                raise BadMessage(f"{type(message).__name__} is no request")
        except BadMessage as error:
            self._counters.add("p2p_served_garbage")
            self._seldom.warning("garbage", "p2p: a packet that is no request: %.200r", str(error))
            return
        if reason := self._refusal(message):
            self._send(route, Refused(message.number, reason))
            self._counters.add("p2p_served_refusals")
        elif isinstance(message, Lookup):
            states = self._host.lookup_all(message.keys)
            for key, state in zip(message.keys, states, strict=True):
                if state is State.HIT:
                    self._leases.keep(message.client, key, time.monotonic())
            self._send(route, Found(message.number, bytes(states)))
        else:
            self._send_pages(route, message)

    def _refusal(self, message: Lookup | Fetch) -> str:
        """Why this request is not answered, or nothing."""
        if message.namespace != self._namespace:
            return "another model or another KV layout"
        if len(message.keys) > MAX_KEYS:
            return f"more than {MAX_KEYS} keys"
        if isinstance(message, Fetch) and len(set(message.keys)) < len(message.keys):
            return "a key is named twice"
        return ""

    def _send_pages(self, route: bytes, message: Fetch) -> None:
        """As many pages as fit; the keys behind count as not there."""
        self._unsent = [entry for entry in self._unsent if not entry[0].done]
        unsent = self.unsent_bytes()
        digests: list[bytes] = []
        pages: list[bytes] = []
        total = 0
        for key in message.keys:
            page = self._page(message.client, key, total, unsent)
            if page:
                digests.append(page_digest(key, memoryview(page)))
                pages.append(page)
                total += len(page)
            else:
                digests.append(b"")
        self._send(route, Pages(message.number, digests), pages)

    def _page(self, client: bytes, key: OffloadKey, total: int, unsent: int) -> bytes:
        """A copy of the page, to go with `total` bytes of others behind `unsent` ones; empty when
        it is not there or does not fit. A page that would be alone always fits."""
        # A block that was found to be wrong is out of the books, leased or not.
        slots = self._host.pin([key])
        if slots is None:
            self._leases.release(client, key)
            return b""
        try:
            size = self._page_bytes(group_of(key))
            too_long = total and total + size > MAX_ANSWER_BYTES
            too_much = (total or unsent) and unsent + total + size > self._max_unsent
            if too_long or too_much:
                self._counters.add("p2p_served_busy")
                return b""
            page = self._host.pool.view(slots[0], size).tobytes()
        finally:
            self._host.unpin(slots)
        self._leases.release(client, key)
        return page

    def _send(self, route: bytes, message: Message, pages: list[bytes] | None = None) -> None:
        frames = [route, encode(message), *(pages or [])]
        try:
            tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:  # the client is gone, or reads too slowly
            self._seldom.warning("lost", "p2p: cannot answer a client: %s", error)
            self._counters.add("p2p_served_lost")
            return
        if pages and tracker is not None:
            size = sum(map(len, pages))
            self._unsent.append((tracker, size))
            self._counters.add("p2p_served_bytes", size)
