"""KV events through real sockets on loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from jaxengine.engine.kv_events import (
    END,
    KVEventPublisher,
    KVEventsConfig,
    parse_kv_events_config,
)
from jaxengine.sched.config import PlannerConfig
from jaxengine.sched.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

STORED = BlockStored([b"h1", b"h2"], None, [1, 2, 3, 4], 2)
decode = msgspec.msgpack.Decoder(EventBatch).decode


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        yield made
        made.destroy(linger=0)


def _socket(context: zmq.Context[Any], kind: int, address: str) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.RCVTIMEO, 5000)
    made.setsockopt(zmq.LINGER, 0)
    if kind == zmq.SUB:
        made.setsockopt(zmq.SUBSCRIBE, b"kv")
    made.connect(address)
    return made


def _subscribed(publisher: KVEventPublisher, subscriber: zmq.Socket[bytes]) -> int:
    """Publish until the subscription has reached the publisher; returns the next number."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        publisher.publish([AllBlocksCleared()])
        if subscriber.poll(50):
            time.sleep(0.05)
            last = -1
            while subscriber.poll(0):
                last = int.from_bytes(subscriber.recv_multipart()[1], "big")
            return last + 1
    raise AssertionError("the subscriber got nothing")


def _replayed(client: zmq.Socket[bytes], start: int) -> list[tuple[int, EventBatch]]:
    client.send_multipart([b"", start.to_bytes(8, "big")])
    found = []
    while (frames := client.recv_multipart())[1] != END:
        assert frames[0] == b""
        found.append((int.from_bytes(frames[1], "big"), decode(frames[2])))
    assert frames[2] == b""
    return found


def test_subscriber_and_replay(context: zmq.Context[Any]) -> None:
    live, replay = (f"tcp://127.0.0.1:{_port()}" for _ in range(2))
    config = KVEventsConfig(True, live, replay, buffer_steps=4, topic="kv")
    publisher = KVEventPublisher(config)
    try:
        subscriber = _socket(context, zmq.SUB, live)
        first = _subscribed(publisher, subscriber)
        publisher.publish([])  # a step without events is no batch
        sent = [[STORED, BlockRemoved([b"h1"])], [AllBlocksCleared()], [STORED]]
        for events in sent:
            publisher.publish(list(events))
        for i, events in enumerate(sent):
            topic, number, payload = subscriber.recv_multipart()
            batch = decode(payload)
            assert topic == b"kv" and int.from_bytes(number, "big") == first + i
            assert batch.events == events and batch.data_parallel_rank == 0
            assert abs(batch.ts - time.time()) < 60
        client = _socket(context, zmq.DEALER, replay)
        held = _replayed(client, first + 1)
        assert [n for n, _ in held] == [first + 1, first + 2]
        assert [b.events for _, b in held] == sent[1:]
        assert _replayed(client, first + 3) == []
        client.send_multipart([b"", b"short"])  # ignored, and the next one is answered
        assert len(_replayed(client, 0)) == min(4, first + 3)
        asker = _socket(context, zmq.REQ, replay)  # REQ takes one answer: the first
        asker.send((first + 2).to_bytes(8, "big"))
        assert int.from_bytes(asker.recv_multipart()[0], "big") == first + 2
    finally:
        publisher.close()
        publisher.close()
    publisher.publish([STORED])  # after the end: nothing, and no error


def test_publish_does_not_wait_for_subscribers() -> None:
    publisher = KVEventPublisher(KVEventsConfig(True, f"tcp://127.0.0.1:{_port()}"))
    try:
        began = time.monotonic()
        for _ in range(5000):
            publisher.publish([STORED])
        assert time.monotonic() - began < 20
    finally:
        publisher.close()


def test_ranks_have_their_own_endpoints(context: zmq.Context[Any]) -> None:
    port = _port()
    publisher = KVEventPublisher(
        KVEventsConfig(True, f"tcp://127.0.0.1:{port - 1}", topic="kv"), rank=1
    )
    try:
        subscriber = _socket(context, zmq.SUB, f"tcp://127.0.0.1:{port}")
        _subscribed(publisher, subscriber)
        publisher.publish([STORED])
        assert decode(subscriber.recv_multipart()[2]).data_parallel_rank == 1
    finally:
        publisher.close()


def test_the_planner_s_events_reach_a_subscriber(context: zmq.Context[Any]) -> None:
    """What a real scheduler records is what arrives."""
    from jaxengine.sched.request import Request
    from jaxengine.sched.scheduler import Scheduler

    planner = Scheduler(
        PlannerConfig(
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=64,
            block_size=4,
            num_blocks=16,
        ),
        record_events=True,
    )
    planner.add(Request("a", list(range(12)), max_tokens=4, eos_token_ids=()))
    assert planner.schedule() is not None
    address = f"tcp://127.0.0.1:{_port()}"
    publisher = KVEventPublisher(KVEventsConfig(True, address, topic="kv"))
    try:
        subscriber = _socket(context, zmq.SUB, address)
        _subscribed(publisher, subscriber)
        publisher.publish(planner.take_events())
        [stored] = decode(subscriber.recv_multipart()[2]).events
        assert isinstance(stored, BlockStored)
        assert stored.token_ids == list(range(12)) and len(stored.block_hashes) == 3
        assert stored.block_size == 4 and stored.parent_block_hash is None
    finally:
        publisher.close()


def test_settings() -> None:
    assert parse_kv_events_config(None) == KVEventsConfig()
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "t", "hwm": 5}'
    assert parse_kv_events_config(text) == KVEventsConfig(True, topic="t", hwm=5)
    assert parse_kv_events_config({"enable": True, "replay_endpoint": None}).enable


@pytest.mark.parametrize(
    "value,named",
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ({"port": 5}, "kv_events_config.port is not known"),
        ({"enable": 1}, "kv_events_config.enable must be bool"),
        ({"buffer_steps": True}, "kv_events_config.buffer_steps must be int"),
        ({"buffer_steps": 0}, "kv_events_config.buffer_steps must be at least 1"),
        ({"endpoint": None}, "kv_events_config.endpoint must be str"),
        ({"publisher": "kafka"}, "kv_events_config.publisher"),
    ],
)
def test_bad_settings_are_named(value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_kv_events_config(value)


def test_an_endpoint_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"cannot bind {address}"):
            KVEventPublisher(KVEventsConfig(True, address))
