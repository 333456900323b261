"""Blocks of other engines: asked for over ZMQ, checked, and given up on soon."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Sequence

import numpy as np
import zmq

from jaxengine.offload.config import PeerConfig
from jaxengine.offload.counters import Counters
from jaxengine.offload.host_pool import Bytes
from jaxengine.offload.keys import OffloadKey
from jaxengine.offload.tiers.host import State
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

ASK_AGAIN = 0.02  # seconds, while a peer still writes the block
REMEMBERED = 4 * MAX_KEYS
WAITING = 4  # late answers that may wait in a socket
_STATES = frozenset(State)


class _Silent(Exception):
    """The peer did not give a usable answer in time."""


class PeerStore:
    """A read-only store over peers.

    A peer that is silent, or answers nonsense, is left alone for `retry_after` seconds: by all
    threads, at once. A peer with another namespace is left alone for good.
    """

    writable = False

    def __init__(
        self, config: PeerConfig, namespace: bytes, counters: Counters, page_bytes: int
    ) -> None:
        """page_bytes: of the largest page; a peer that sends more at once is cut off."""
        self._max_frame = max(page_bytes, MAX_CONTROL_BYTES)
        self._config = config
        self._namespace = namespace
        self._counters = counters
        self._numbers = itertools.count()
        self._name = uuid.uuid4().bytes
        self._local = threading.local()  # ZMQ sockets belong to one thread
        self._lock = threading.Lock()  # of all below
        self._down: dict[str, float] = {}  # until when (monotonic)
        self._where: dict[OffloadKey, str] = {}

    def contains(self, keys: Sequence[OffloadKey], stop_at_miss: bool) -> list[bool]:
        found: dict[OffloadKey, str] = {}
        for peer in self._config.peers:
            rest = [key for key in keys if key not in found][:MAX_KEYS]
            if rest and self._is_up(peer):
                found.update(dict.fromkeys(self._ask(peer, rest), peer))
        with self._lock:
            if len(self._where) > REMEMBERED:
                self._where.clear()
            self._where.update(found)
        return [key in found for key in keys]

    def read(self, keys: Sequence[OffloadKey], into: Sequence[Bytes]) -> list[bool]:
        ok = [False] * len(keys)
        with self._lock:
            places = [self._where.pop(key, "") for key in keys]
        for peer in dict.fromkeys(places):
            mine = [i for i, place in enumerate(places) if place == peer]
            if peer and self._is_up(peer):
                self._fetch(peer, [(i, keys[i], into[i]) for i in mine], ok)
        return ok

    def write(self, key: OffloadKey, data: Bytes) -> bool:
        """Peers ask for what they want; nothing is pushed."""
        return False

    def delete(self, key: OffloadKey) -> None:
        """Peers forget by themselves."""

    def close(self) -> None:
        """Sockets close with their threads."""

    # -- parts ------------------------------------------------------------------------------

    def _ask(self, peer: str, keys: list[OffloadKey]) -> list[OffloadKey]:
        """The keys that the peer has. Waits for blocks that it is about to have."""
        deadline = time.monotonic() + self._config.lookup_timeout
        while True:
            number = next(self._numbers)
            try:
                answer, _ = self._call(
                    peer, Lookup(number, self._name, self._namespace, keys), deadline
                )
                if (
                    not isinstance(answer, Found)
                    or len(answer.states) != len(keys)
                    or not _STATES.issuperset(answer.states)
                ):
                    raise self._nonsense("it answered something else than asked")
            except _Silent as error:
                self._mark_down(peer, error)
                return []
            waits = State.PENDING in answer.states
            if not waits or time.monotonic() + ASK_AGAIN >= deadline:
                pairs = zip(keys, answer.states, strict=True)
                return [key for key, state in pairs if state == State.HIT]
            time.sleep(ASK_AGAIN)

    def _fetch(
        self, peer: str, wanted: list[tuple[int, OffloadKey, Bytes]], ok: list[bool]
    ) -> None:
        """Fill the pages that the peer gives, in as many requests as it answers whole."""
        deadline = time.monotonic() + self._config.fetch_timeout
        while wanted and self._is_up(peer):
            sizes = itertools.accumulate(target.nbytes for _, _, target in wanted)
            count = max(1, sum(size <= MAX_ANSWER_BYTES for size in sizes))
            self._fetch_some(peer, wanted[:count], ok, deadline)
            wanted = wanted[count:]

    def _fetch_some(
        self,
        peer: str,
        wanted: list[tuple[int, OffloadKey, Bytes]],
        ok: list[bool],
        deadline: float,
    ) -> None:
        keys = [key for _, key, _ in wanted]
        number = next(self._numbers)
        try:
            answer, pages = self._call(
                peer, Fetch(number, self._name, self._namespace, keys), deadline
            )
            if not isinstance(answer, Pages) or len(answer.digests) != len(keys):
                raise self._nonsense("it answered something else than asked")
            if sum(map(bool, answer.digests)) != len(pages):
                raise self._nonsense("it sent more or fewer pages than it said")
        except _Silent as error:
            self._mark_down(peer, error)
            return
        frames = iter(pages)
        for (i, key, target), digest in zip(wanted, answer.digests, strict=True):
            if not digest:
                self._counters.add("p2p_vanished")
                continue
            page = next(frames)
            if len(page) != target.nbytes or page_digest(key, memoryview(page)) != digest:
                self._counters.add("p2p_damaged")
                continue
            target[:] = np.frombuffer(page, np.uint8)
            ok[i] = True

    def _call(
        self, peer: str, message: Lookup | Fetch, deadline: float
    ) -> tuple[Message, list[bytes]]:
        """Raises _Silent. Late answers to earlier calls are skipped."""
        try:
            socket = self._socket(peer)
            socket.send(encode(message), zmq.NOBLOCK)
            while True:
                left = deadline - time.monotonic()
                if left <= 0 or not socket.poll(int(left * 1000) + 1):
                    raise _Silent("no answer in time")
                frames = socket.recv_multipart()
                answer = decode(frames[0])
                if answer.number != message.number:
                    continue
                if isinstance(answer, Refused):
                    self._counters.add("p2p_refused")
                    with self._lock:
                        self._down[peer] = float("inf")
                    raise _Silent(f"it refuses: {answer.reason[:200]!r}")
                return answer, frames[1:]
        except BadMessage as error:
            self._drop_socket(peer)
            raise self._nonsense(f"what it sent is no message: {str(error)[:200]!r}") from error
        except zmq.ZMQError as error:
            self._drop_socket(peer)
            raise _Silent(str(error)) from error
        except _Silent:
            self._drop_socket(peer)
            raise

    def _nonsense(self, what: str) -> _Silent:
        self._counters.add("p2p_garbage")
        return _Silent(what)

    def _socket(self, peer: str) -> zmq.Socket[bytes]:
        sockets: dict[str, zmq.Socket[bytes]] = self._local.__dict__.setdefault("sockets", {})
        if peer not in sockets:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.linger = 0
            socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame)
            socket.setsockopt(zmq.RCVHWM, WAITING)
            socket.setsockopt(zmq.IPV6, int("[" in peer))
            sockets[peer] = socket  # before it connects: `_drop_socket` closes it
            socket.connect(peer)
        return sockets[peer]

    def _drop_socket(self, peer: str) -> None:
        socket = self._local.__dict__.get("sockets", {}).pop(peer, None)
        if socket is not None:
            socket.close()

    def _is_up(self, peer: str) -> bool:
        with self._lock:
            return self._down.get(peer, 0.0) <= time.monotonic()

    def _mark_down(self, peer: str, error: Exception) -> None:
        log.warning("p2p: peer %s: %s", peer, error)
        self._counters.add("p2p_peer_failures")
        until = time.monotonic() + self._config.retry_after
        with self._lock:
            self._down[peer] = max(until, self._down.get(peer, 0.0))
