"""Packets that are no messages: each is counted, none ends a thread, on either side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_peers import SPACE, client, count, fetch, host_with, keys, serve, wait_until

from jaxengine.offload.tiers.p2p_messages import (
    BadMessage,
    Fetch,
    Found,
    Lookup,
    Message,
    Pages,
    Refused,
    decode,
)
from jaxengine.offload.tiers.p2p_server import PeerServer

pack = msgspec.msgpack.encode

LOOKUP = {"type": "Lookup", "number": 1, "client": b"c", "namespace": SPACE, "keys": [b"k" * 36]}
DEEP = b"\x91" * 100_000 + b"\x90"  # arrays in arrays


def with_field(message: dict[str, Any], name: str, raw: bytes, first: bool = False) -> bytes:
    """The message with one field more, whose value is `raw` msgpack."""
    head, body, field = bytes([0x81 + len(message)]), pack(message)[1:], pack(name) + raw
    return head + (field + body if first else body + field)


GARBAGE: dict[str, list[bytes]] = {
    "nothing": [b""],
    "no msgpack": [b"\xc1" * 100],
    "two frames": [pack(LOOKUP), b""],
    "100,000 frames": [pack(LOOKUP)] * 100_000,
    "deep in an unknown field": [with_field(LOOKUP, "x", DEEP)],
    "deep before the tag": [with_field(LOOKUP, "x", DEEP, first=True)],
    "deep in a known field": [with_field({**LOOKUP, "client": b""}, "keys", DEEP)],
    "deep and nothing else": [DEEP],
    "an unknown field": [pack({**LOOKUP, "x": 1})],
    "an unknown tag": [pack({**LOOKUP, "type": "Look"})],
    "a tag that is no text": [pack({**LOOKUP, "type": 1})],
    "text that is no UTF-8": [b"\x81\xa4type\xa2\xff\xfe"],
    "a number too big": [pack(LOOKUP).replace(b"number\x01", b"number\xcb" + b"\x7f" * 8)],
    "a number below 0": [pack({**LOOKUP, "number": -1})],
    "text for bytes": [pack({**LOOKUP, "client": "c"})],
    "one key, no list": [pack({**LOOKUP, "keys": b"k" * 36})],
    "a key of 10 kB": [pack({**LOOKUP, "keys": [b"k" * 10_000]})],
    "a key without a hash": [pack({**LOOKUP, "keys": [b"\0\0\0\0"]})],
    "a name of 10 kB": [pack({**LOOKUP, "client": b"c" * 10_000})],
    "a missing field": [pack({"type": "Fetch", "number": 1, "client": b"c"})],
    "bytes behind the end": [pack(LOOKUP) + b"\0"],
    "more keys promised than sent": [pack({**LOOKUP, "keys": []})[:-1] + b"\xdd\xff\xff\xff\xff"],
    "an answer": [pack(Found(1, b""))],
    "another answer": [pack(Pages(1, []))],
    "a refusal": [pack(Refused(1, "no"))],
}


def dealer(endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    return socket


@pytest.fixture(scope="module")
def server() -> Iterator[PeerServer]:
    made = serve(host_with(8))
    yield made
    made.close()


def garbage(server: PeerServer) -> float:
    return server._counters.get("p2p_served_garbage")


def is_served(server: PeerServer) -> bool:
    store = client(server.endpoint, patience=10.0)
    return store.contains(keys(range(2)), True) == [True, True] and fetch(store, range(2)) == [
        True,
        True,
    ]


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_the_server_counts_it_and_goes_on(server: PeerServer, frames: list[bytes]) -> None:
    before = garbage(server)
    socket = dealer(server.endpoint)
    socket.send_multipart(frames)
    wait_until(lambda: garbage(server) == before + 1, 10.0)
    assert is_served(server)
    socket.close()


def test_a_message_cut_anywhere(server: PeerServer) -> None:
    whole = pack(Fetch(7, b"client", SPACE, [b"k" * 36, b"l" * 36]))
    before = garbage(server)
    socket = dealer(server.endpoint)
    for length in range(len(whole)):
        socket.send(whole[:length])
    wait_until(lambda: garbage(server) == before + len(whole), 10.0)
    assert is_served(server)
    socket.close()


def test_an_error_of_ours_is_counted_and_ends_nothing() -> None:
    server = serve(host_with(2))
    real = server._host.lookup_all
    server._host.lookup_all = lambda keys: 1 / 0  # type: ignore[method-assign,assignment]
    socket = dealer(server.endpoint)
    socket.send(pack(LOOKUP))
    wait_until(lambda: server._counters.get("p2p_served_errors") == 1, 10.0)
    server._host.lookup_all = real  # type: ignore[method-assign]
    assert is_served(server)
    socket.close()
    server.close()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary()
    | st.text() | st.sampled_from(["Lookup", "Fetch", "Found", "Pages", "Refused"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["type", "number", "client", "namespace", "keys", "states", "x"]), inner
    ),
    max_leaves=12,
)  # fmt: skip
VALID = [pack(LOOKUP), pack({**LOOKUP, "type": "Fetch"}), pack(Pages(3, [b"d"]))]


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    """Anything; or something well formed; or a message with some bytes changed."""
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return draw(st.binary(max_size=200))
    if kind == 1:
        return pack(draw(VALUES))
    packet = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        packet[draw(st.integers(0, len(packet) - 1))] = draw(st.integers(0, 255))
    return bytes(packet)


def is_request(packet: bytes) -> bool:
    try:
        return isinstance(decode(packet), Lookup | Fetch)
    except BadMessage:
        return False


@settings(max_examples=300, deadline=None)
@given(packet=packets())
def test_every_packet_is_a_message_or_garbage(packet: bytes) -> None:
    try:
        message = decode(packet)
    except BadMessage:
        return
    assert isinstance(message, Message)
    assert decode(pack(message)) == message


@settings(max_examples=20, deadline=None)
@given(sent=st.lists(packets(), min_size=1, max_size=20))
def test_no_mix_of_packets_ends_the_server(server: PeerServer, sent: list[bytes]) -> None:
    before = garbage(server)
    wrong = sum(not is_request(packet) for packet in sent)
    socket = dealer(server.endpoint)
    for packet in sent:
        socket.send(packet)
    wait_until(lambda: garbage(server) == before + wrong, 10.0)
    assert is_served(server)
    socket.close()


# -- the asking side --------------------------------------------------------------------------


@pytest.fixture
def peer() -> Iterator[tuple[str, list[Callable[[Any], list[bytes]]]]]:
    """A peer whose answers are what the functions in the list make of the request, in turn."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind("tcp://127.0.0.1:*")
    answers: list[Callable[[Any], list[bytes]]] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            if socket.poll(20):
                route, frame = socket.recv_multipart()
                socket.send_multipart([route, *answers.pop(0)(decode(frame))])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield socket.getsockopt_string(zmq.LAST_ENDPOINT), answers
    stop.set()
    thread.join(5)
    socket.close()


def found(request: Any) -> list[bytes]:
    return [pack(Found(request.number, b"\x02" * len(request.keys)))]


ANSWERS: dict[str, Callable[[Any], list[bytes]]] = {
    "nothing": lambda request: [b""],
    "deep": lambda request: [
        with_field({"type": "Found", "number": request.number, "states": b""}, "x", DEEP, True)
    ],
    "an unknown field": lambda request: [
        pack({"type": "Found", "number": request.number, "states": b"\2\2", "x": 0})
    ],
    "too few states": lambda request: [pack(Found(request.number, b"\x02"))],
    "states that are none": lambda request: [pack(Found(request.number, b"\xff\xff"))],
    "a request": lambda request: [pack(request)],
    "pages": lambda request: [pack(Pages(request.number, [b"d", b"e"])), b"", b""],
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_the_asker_counts_it_and_leaves_the_peer(
    peer: tuple[str, list[Callable[[Any], list[bytes]]]], answer: Callable[[Any], list[bytes]]
) -> None:
    endpoint, answers = peer
    answers.append(answer)
    store = client(endpoint, patience=10.0)
    assert store.contains(keys(range(2)), True) == [False, False]
    assert count(store, "p2p_garbage") == 1
    assert count(store, "p2p_peer_failures") == 1
    assert store.contains(keys(range(2)), True) == [False, False]  # not asked again
    assert count(store, "p2p_peer_failures") == 1


PAGES: dict[str, Callable[[Any], list[bytes]]] = {
    "found": found,
    "no digests": lambda request: [pack(Pages(request.number, []))],
    "a page too many": lambda request: [pack(Pages(request.number, [b"", b""])), b"page"],
    "a page too few": lambda request: [pack(Pages(request.number, [b"", b"d" * 16]))],
}


@pytest.mark.parametrize("answer", PAGES.values(), ids=PAGES.keys())
def test_pages_that_do_not_fit_are_garbage(
    peer: tuple[str, list[Callable[[Any], list[bytes]]]], answer: Callable[[Any], list[bytes]]
) -> None:
    endpoint, answers = peer
    answers += [found, answer]
    store = client(endpoint, patience=10.0)
    assert store.contains(keys(range(2)), True) == [True, True]
    assert fetch(store, range(2)) == [False, False]
    assert count(store, "p2p_garbage") == 1


def test_a_refusal_is_logged_as_what_it_is(
    peer: tuple[str, list[Callable[[Any], list[bytes]]]], caplog: pytest.LogCaptureFixture
) -> None:
    """A peer cannot write lines of its own into the log."""
    endpoint, answers = peer
    answers.append(lambda request: [pack(Refused(request.number, "a\n12:00 FORGED\x1b[2J" * 999))])
    store = client(endpoint, patience=10.0)
    assert store.contains(keys(range(2)), True) == [False, False]
    [line] = [record.getMessage() for record in caplog.records]
    assert "\n" not in line and "\x1b" not in line and len(line) < 500


def test_an_endless_answer_is_cut_off(
    peer: tuple[str, list[Callable[[Any], list[bytes]]]],
) -> None:
    """A frame that is bigger than any page ends the connection, not the engine's memory."""
    endpoint, answers = peer
    answers.append(lambda request: [pack(Refused(request.number, "")), bytes(17 * 2**20)])
    store = client(endpoint)
    assert store.contains(keys(range(2)), True) == [False, False]
    assert count(store, "p2p_peer_failures") == 1 and count(store, "p2p_refused") == 0
