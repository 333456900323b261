"""Who joins node 0: the nodes that it waits for, and nobody else."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from jaxengine.config import EngineConfig
from jaxengine.executor import nodes
from jaxengine.executor.coupling import free_port
from jaxengine.executor.nodes import LeadingExecutor, digest


class Leader(threading.Thread):
    """Node 0 of two, on its way up."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.config = EngineConfig.of(nnodes=2, master_port=free_port() - 1)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peers: list[zmq.Socket[bytes]] = []
        self.executor: LeadingExecutor | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        inner: Any = SimpleNamespace(shutdown=lambda: None)
        try:
            self.executor = LeadingExecutor(inner, self.config)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def peer(self, name: bytes) -> zmq.Socket[bytes]:
        peer = self.context.socket(zmq.DEALER)
        peer.setsockopt(zmq.IDENTITY, name)
        self.peers.append(peer)
        return peer

    def reach(self, peer: zmq.Socket[bytes]) -> None:
        peer.connect(f"tcp://127.0.0.1:{self.config.parallel.master_port + 1}")

    def say(self, name: bytes, *parts: bytes) -> None:
        """A peer comes, says this and stays."""
        peer = self.peer(name)
        self.reach(peer)
        peer.send_multipart(parts)


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 20)
    one = Leader()
    yield one
    one.join(30)
    if one.executor is not None:
        with contextlib.suppress(zmq.ZMQError):  # a node that left already
            one.executor.shutdown()
    one.context.destroy(linger=0)


def test_strangers_do_not_end_the_start(leader: Leader, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for name in (b"node 2", b"node 0", b"node 1\x1b[31m\nforged", b"\xff" * 200):
            leader.say(name, b"another digest")
        leader.say(b"node 3", b"", b"")
        until(lambda: bool(caplog.records) or not leader.is_alive())
        leader.say(b"node 1", digest(leader.config))
        leader.join(25)
    assert leader.error is None and leader.executor is not None
    assert len(caplog.records) == 1 and caplog.messages[0].isprintable()
    assert "ignored" in caplog.messages[0]


def test_what_is_too_long_is_not_read(leader: Leader) -> None:
    liar = leader.peer(b"node 1")
    liar.setsockopt(zmq.RECONNECT_IVL, -1)
    monitor = liar.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    leader.reach(liar)
    liar.send(bytes(2**20))
    disconnected = monitor.poll(15_000)
    liar.disable_monitor()
    assert disconnected, "it was read"
    leader.say(b"node 1", digest(leader.config))
    leader.join(25)
    assert leader.error is None and leader.executor is not None


def test_a_silent_stranger_does_not_keep_a_name(leader: Leader) -> None:
    squatter = leader.peer(b"node 1")
    monitor = squatter.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    leader.reach(squatter)
    assert monitor.poll(15_000)
    squatter.disable_monitor()
    leader.say(b"node 1", digest(leader.config))
    leader.join(25)
    assert leader.error is None and leader.executor is not None


@pytest.mark.parametrize("parts", [(b"\x1b[31m",), (b"",), (b"\x1b[31m", b"more")], ids=str)
def test_a_node_with_other_settings_ends_it(leader: Leader, parts: tuple[bytes, ...]) -> None:
    leader.say(b"node 1", *parts)
    leader.join(25)
    assert isinstance(leader.error, RuntimeError)
    assert str(leader.error) == "node 1 has other settings than node 0"


def until(check: Any) -> None:
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
