"""Peers that die, stall, lie or serve another model: bounded waits, no wrong byte (B41)."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
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

from jaxengine.offload.config import PeerConfig
from jaxengine.offload.counters import Counters
from jaxengine.offload.keys import namespace_key
from jaxengine.offload.tiers.p2p import PeerStore
from jaxengine.offload.tiers.p2p_messages import Found, Pages, decode


def test_blocks_from_two_peers_and_leases() -> None:
    first, second = host_with(8), host_with(16)
    servers = [serve(first), serve(second)]
    store = client(*[server.endpoint for server in servers])
    written = first.reserve(keys(range(40, 44)))  # evicts 0 .. 3
    assert written is not None
    assert store.contains(keys(range(10)), True) == [True] * 10
    assert first.num_busy == 8 and second.num_busy == 6  # four are being written, ten kept
    assert first.reserve([key_of(50)]) is None  # not even for a store of their own
    assert fetch(store, range(10)) == [True] * 10
    first.commit(written.slots, False)
    assert first.num_busy == second.num_busy == 0
    for server in servers:
        server.close()


def test_an_open_address_is_said_to_be_one(caplog: pytest.LogCaptureFixture) -> None:
    serve(host_with(2)).close()
    assert not caplog.records
    serve(host_with(2), bind="tcp://*:*").close()
    [record] = caplog.records
    assert "whoever reaches tcp://*:* can read the KV" in record.getMessage()


def test_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    server = serve(host_with(2), bind="tcp://[::1]:*")
    store = client(server.endpoint, patience=10.0)
    assert store.contains(keys(range(2)), True) == [True, True]
    server.close()


def test_an_address_that_cannot_be_reached_is_a_peer_that_is_down() -> None:
    store = client("tcp://no port")
    assert store.contains(keys(range(2)), True) == [False, False]
    assert store.contains(keys(range(2)), True) == [False, False]
    assert count(store, "p2p_peer_failures") == 1


def test_unfetched_leases_end() -> None:
    host = host_with(4)
    server = serve(host, lease=0.2)
    store = client(server.endpoint)
    assert all(store.contains(keys(range(4)), True))
    wait_until(lambda: host.num_busy == 0)
    assert host.reserve([key_of(50)]) is not None  # evicts block 0
    assert fetch(store, range(2)) == [False, True]
    assert count(store, "p2p_vanished") == 1
    server.close()


def test_a_block_that_is_being_written_is_waited_for() -> None:
    host = host_with(4)
    reserved = host.reserve([key_of(9)])
    assert reserved is not None
    host.pool.view(reserved.slots[0])[:] = page_of(9)
    server = serve(host)
    store = client(server.endpoint)
    timer = threading.Timer(0.1, host.commit, (reserved.slots, True))
    timer.start()
    assert store.contains([key_of(9)], True) == [True]
    timer.join()
    assert fetch(store, range(9, 10)) == [True]
    server.close()


def test_another_model_is_refused_for_good() -> None:
    server = serve(host_with(2), namespace_key({"model": "other"}))
    store = client(server.endpoint, retry_after=0.01)
    assert store.contains(keys(range(2)), True) == [False, False]
    time.sleep(0.05)
    assert store.contains(keys(range(2)), True) == [False, False]
    assert count(store, "p2p_refused") == 1  # not asked again
    server.close()


@pytest.fixture
def liar() -> Iterator[tuple[str, dict[str, object]]]:
    """A peer that answers as told: how["pages"](fetch) gives the frames of an answer."""
    peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    peer.linger = 0
    peer.bind("tcp://127.0.0.1:*")
    how: dict[str, object] = {}
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            if peer.poll(20):
                name, frame = peer.recv_multipart()
                message = decode(frame)
                frames = how["answer"](message)  # type: ignore[operator]
                if frames:
                    peer.send_multipart([name, *frames])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield peer.getsockopt_string(zmq.LAST_ENDPOINT), how
    stop.set()
    thread.join(5)
    peer.close()


def test_wrong_bytes_and_wrong_answers(liar: tuple[str, dict[str, object]]) -> None:
    endpoint, how = liar
    encode = msgspec.msgpack.encode

    def lies(message: object) -> list[bytes]:
        if type(message).__name__ == "Lookup":
            return [encode(Found(message.number, b"\x02" * 3))]  # type: ignore[attr-defined]
        digests = [b"d" * 16, b"e" * 16, b"f" * 16]
        pages = [page_of(0).tobytes(), b"short", b""]
        return [encode(Pages(message.number, digests)), *pages]  # type: ignore[attr-defined]

    how["answer"] = lies
    store = client(endpoint)
    assert all(store.contains(keys(range(3)), True))
    assert fetch(store, range(3)) == [False] * 3
    assert count(store, "p2p_damaged") == 3
    how["answer"] = lambda message: [encode(Found(message.number, b""))]  # too few
    assert store.contains(keys(range(3)), True) == [False] * 3
    assert count(store, "p2p_peer_failures") == 1


def test_a_silent_peer_costs_one_wait(liar: tuple[str, dict[str, object]]) -> None:
    """Handshake never, then lookup answered and fetch never."""
    endpoint, how = liar
    how["answer"] = lambda message: None
    store = client(endpoint, retry_after=1.5)
    began = time.monotonic()
    for _ in range(20):
        assert store.contains(keys(range(2)), True) == [False, False]
    assert time.monotonic() - began < 3  # not 20 waits of 0.3 s
    time.sleep(1.5)
    encode = msgspec.msgpack.encode
    how["answer"] = lambda message: (
        [encode(Found(message.number, b"\x02\x02"))] if type(message).__name__ == "Lookup" else None
    )
    assert store.contains(keys(range(2)), True) == [True, True]
    began = time.monotonic()
    assert fetch(store, range(2)) == [False, False]
    assert time.monotonic() - began < 5
    assert count(store, "p2p_peer_failures") == 2


SERVER = """
import sys, time
from offload_peers import host_with, serve
server = serve(host_with(64))
print(server.endpoint, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_process_dies_between_lookup_and_fetch(sent: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)},
    )
    try:
        assert process.stdout is not None
        store = PeerStore(
            PeerConfig(peers=(process.stdout.readline().strip(),), fetch_timeout=0.5),
            SPACE,
            Counters(),
            PAGE,
        )
        assert all(store.contains(keys(range(64)), True))
        assert all(fetch(store, range(32)))
        process.send_signal(sent)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)  # not sent: felt
        began = time.monotonic()
        assert fetch(store, range(32, 64)) == [False] * 32
        assert not any(store.contains(keys(range(64)), True))
        assert time.monotonic() - began < 8  # not a wait for each of 32 keys
        assert count(store, "p2p_peer_failures") == 1
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
