"""What one client can make a peer hold: pages of answers, and blocks that are kept for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from offload_peers import (
    PAGE,
    SPACE,
    client,
    count,
    fetch,
    host_with,
    key_of,
    keys,
    page_of,
    serve,
    wait_until,
)

from jaxengine.offload.tiers import p2p, p2p_server
from jaxengine.offload.tiers.host import HostTier
from jaxengine.offload.tiers.p2p_messages import (
    Fetch,
    Found,
    Lookup,
    Pages,
    Refused,
    decode,
    page_digest,
)
from jaxengine.offload.tiers.p2p_server import PeerServer

pack = msgspec.msgpack.encode


class Caller:
    """A client that says what it likes."""

    def __init__(self, server: PeerServer, queue: int = 1000) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 10_000
        self.socket.setsockopt(zmq.RCVHWM, queue)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(server.endpoint)

    def call(self, message: Lookup | Fetch) -> tuple[Any, list[bytes]]:
        self.socket.send(pack(message))
        answer, *pages = self.socket.recv_multipart()
        return decode(answer), pages


@pytest.fixture
def pair() -> Iterator[tuple[HostTier, PeerServer]]:
    host = host_with(16)
    server = serve(host)
    yield host, server
    server.close()


def figure(server: PeerServer, name: str) -> float:
    return server._counters.get(name)


def test_a_key_is_fetched_once(pair: tuple[HostTier, PeerServer]) -> None:
    _, server = pair
    caller = Caller(server)
    answer, pages = caller.call(Fetch(1, b"a", SPACE, [key_of(1)] * 65_536))
    assert isinstance(answer, Refused) and "a key is named twice" in answer.reason and not pages
    answer, pages = caller.call(Fetch(2, b"a", SPACE, [key_of(1)]))
    assert pages == [page_of(1).tobytes()]
    wait_until(lambda: figure(server, "p2p_served_bytes") == PAGE)
    caller.socket.close()


def test_an_answer_has_a_limit_of_bytes(
    pair: tuple[HostTier, PeerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server = pair
    monkeypatch.setattr(p2p_server, "MAX_ANSWER_BYTES", 3 * PAGE + 1)
    caller = Caller(server)
    answer, pages = caller.call(Fetch(1, b"a", SPACE, keys(range(8))))
    assert [bool(digest) for digest in answer.digests] == [True] * 3 + [False] * 5
    assert pages == [page_of(i).tobytes() for i in range(3)]
    assert figure(server, "p2p_served_busy") == 5
    caller.socket.close()


@pytest.mark.parametrize("limit", [1, PAGE, 3 * PAGE + 1, 100 * PAGE])
def test_an_asker_gets_all_in_answers_within_the_limit(
    pair: tuple[HostTier, PeerServer], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A page that is bigger than the limit comes alone."""
    _, server = pair
    monkeypatch.setattr(p2p_server, "MAX_ANSWER_BYTES", limit)
    monkeypatch.setattr(p2p, "MAX_ANSWER_BYTES", limit)
    store = client(server.endpoint, patience=10.0)
    assert all(store.contains(keys(range(8)), True))
    assert fetch(store, range(8)) == [True] * 8
    assert figure(server, "p2p_served_busy") == 0


def test_what_nobody_reads_is_bounded_and_given_up() -> None:
    """Connections that ask and never read: the server holds its limit, and serves others again
    when it has given them up."""
    blocks, big = 4, 8 * 2**20  # more than the kernel takes in
    host = host_with(blocks, big)
    server = serve(host, page_bytes=big, max_unsent=2 * big, stall=3.0)
    callers = [Caller(server, queue=1) for _ in range(4)]
    for caller in callers:
        for turn in range(3):  # these fill the caller's queue
            caller.socket.send(pack(Lookup(turn, b"", SPACE, [])))
        caller.socket.send(pack(Fetch(3, b"", SPACE, keys(range(blocks)))))
    # The first one's answer fills the limit, the others get nothing.
    wait_until(lambda: figure(server, "p2p_served_busy") == blocks * 4 - 2, 20.0)
    assert server.unsent_bytes() == 2 * big
    wait_until(lambda: server.unsent_bytes() == 0, 60.0)  # though nobody has read
    asker = Caller(server)
    answer, pages = asker.call(Fetch(1, b"", SPACE, [key_of(1)]))
    assert isinstance(answer, Pages) and [len(page) for page in pages] == [big]
    for caller in [*callers, asker]:
        caller.socket.close()
    server.close()


def test_peers_never_keep_more_than_half(pair: tuple[HostTier, PeerServer]) -> None:
    """However many clients ask: stores of the engine's own go on."""
    host, server = pair
    caller = Caller(server)
    for number in range(40):
        found, _ = caller.call(Lookup(number, b"%d" % number, SPACE, keys(range(16))))
        assert isinstance(found, Found) and found.states == b"\2" * 16
    assert host.num_busy == 8 and server.num_leases == 8 * 40
    assert figure(server, "p2p_leases_denied") == 8 * 40
    reserved = host.reserve([key_of(i) for i in range(100, 108)])
    assert reserved is not None and len(reserved.slots) == 8
    assert host.reserve([key_of(200)]) is None
    # What is still there can be fetched without a lease.
    host.commit(reserved.slots, True)
    answer, _ = caller.call(Fetch(100, b"stranger", SPACE, [key_of(100)]))
    assert answer.digests != [b""]
    caller.socket.close()


def test_a_client_has_one_lease_of_a_block(pair: tuple[HostTier, PeerServer]) -> None:
    host, server = pair
    caller = Caller(server)
    for number in range(50):
        caller.call(Lookup(number, b"one", SPACE, [key_of(1), key_of(1), key_of(2)]))
    assert server.num_leases == 2
    caller.call(Fetch(99, b"one", SPACE, [key_of(1), key_of(2)]))
    assert server.num_leases == 0 and host.num_busy == 0
    host.check()
    caller.socket.close()


def test_the_number_of_leases_is_bounded(
    pair: tuple[HostTier, PeerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, server = pair
    monkeypatch.setattr("jaxengine.offload.tiers.p2p_leases.MAX_LEASES", 10)
    caller = Caller(server)
    for number in range(40):
        caller.call(Lookup(number, b"%d" % number, SPACE, [key_of(1)]))
    assert server.num_leases == 10
    caller.socket.close()


def test_a_block_that_proved_wrong_is_not_given_out(pair: tuple[HostTier, PeerServer]) -> None:
    """A request that ends with NaN takes its blocks back, also those that a peer has leased."""
    host, server = pair
    store = client(server.endpoint, patience=10.0)
    assert store.contains(keys(range(2)), True) == [True, True]
    host.discard([key_of(0)])
    page = np.zeros(PAGE, np.uint8)
    assert store.read([key_of(0)], [page]) == [False]
    assert count(store, "p2p_vanished") == 1 and server.num_leases == 1
    assert fetch(store, range(1, 2)) == [True]
    wait_until(lambda: host.num_busy == 0)
    host.check()


def test_the_digest_is_of_key_and_page(pair: tuple[HostTier, PeerServer]) -> None:
    _, server = pair
    caller = Caller(server)
    answer, pages = caller.call(Fetch(1, b"a", SPACE, keys(range(3))))
    expected = [page_digest(key_of(i), memoryview(page_of(i).tobytes())) for i in range(3)]
    assert answer.digests == expected and len(pages) == 3
    caller.socket.close()
