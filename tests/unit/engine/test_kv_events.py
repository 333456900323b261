"""KV events through real sockets on loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from jaxengine.engine.kv_event_replay import END
from jaxengine.engine.kv_events import KVEventPublisher
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from jaxengine.settings.kv_events import KVEventsConfig, parse_kv_events_config

STORED = BlockStored([b"h1", b"h2"], None, [1, 2, 3, 4], 2)
REMOVED = BlockRemoved([b"h1"], group_idx=1)


# -- what a subscriber written for vLLM 0.33 decodes with: maps by field name in an array --------


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    """Fields that a subscriber does not know are skipped; a missing one is an error."""


class Stored(Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Of subscribers that know no ranks."""

    ts: float
    events: list[Stored | Removed | Cleared]


decode = msgspec.msgpack.Decoder(Batch).decode


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


def _replayed(client: zmq.Socket[bytes], start: int) -> list[tuple[int, Batch]]:
    client.send_multipart([b"", start.to_bytes(8, "big")])
    return _rest(client)


def _rest(client: zmq.Socket[bytes]) -> list[tuple[int, Batch]]:
    """What is answered up to the end."""
    found = []
    while (frames := client.recv_multipart())[2] != END:
        empty, topic, number, payload = frames
        assert (empty, topic) == (b"", b"kv")
        found.append((int.from_bytes(number, "big"), decode(payload)))
    assert frames == [b"", b"", END, b""]
    return found


def test_events_are_what_vllm_s_subscribers_read(context: zmq.Context[Any]) -> None:
    address = f"tcp://127.0.0.1:{_port()}"
    publisher = KVEventPublisher(KVEventsConfig(True, address, topic="kv"), rank=0)
    try:
        subscriber = _socket(context, zmq.SUB, address)
        _subscribed(publisher, subscriber)
        publisher.publish([STORED, REMOVED, AllBlocksCleared()])
        topic, number, payload = subscriber.recv_multipart()
    finally:
        publisher.close()
    assert topic == b"kv" and len(number) == 8
    batch = decode(payload)
    assert batch.data_parallel_rank == 0
    stored = Stored([b"h1", b"h2"], None, [1, 2, 3, 4], 2, None, "GPU", None, group_idx=0)
    assert batch.events == [stored, Removed([b"h1"], "GPU", 1), Cleared()]
    assert msgspec.msgpack.decode(payload, type=OldBatch).events == batch.events
    plain = msgspec.msgpack.decode(payload)
    assert [event["type"] for event in plain[1]] == [
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    ]


def test_subscriber_and_replay(context: zmq.Context[Any]) -> None:
    live, replay = (f"tcp://127.0.0.1:{_port()}" for _ in range(2))
    config = KVEventsConfig(True, live, replay, buffer_steps=4, topic="kv")
    publisher = KVEventPublisher(config)
    try:
        subscriber = _socket(context, zmq.SUB, live)
        first = _subscribed(publisher, subscriber)
        publisher.publish([])  # a step without events is no batch
        sent: list[list[KVEvent]] = [[STORED, REMOVED], [AllBlocksCleared()], [STORED]]
        for events in sent:
            publisher.publish(list(events))
        live_batches = []
        for i, events in enumerate(sent):
            topic, number, payload = subscriber.recv_multipart()
            batch = decode(payload)
            assert topic == b"kv" and int.from_bytes(number, "big") == first + i
            assert len(batch.events) == len(events) and batch.data_parallel_rank == 0
            assert abs(batch.ts - time.time()) < 60
            live_batches.append((first + i, batch))
        client = _socket(context, zmq.DEALER, replay)
        assert _replayed(client, first + 1) == live_batches[1:]
        assert _replayed(client, first + 3) == []
        assert len(_replayed(client, 0)) == min(4, first + 3)
        asker = _socket(context, zmq.REQ, replay)  # REQ takes one answer: the first
        asker.send((first + 2).to_bytes(8, "big"))
        assert int.from_bytes(asker.recv_multipart()[1], "big") == first + 2
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


def test_a_port_that_the_system_chooses_is_not_raised() -> None:
    for address in ("tcp://127.0.0.1:0", "tcp://127.0.0.1:*"):
        publisher = KVEventPublisher(KVEventsConfig(True, address), rank=3)
        assert int(publisher.endpoint.rpartition(":")[2]) > 3
        publisher.close()


def test_the_scheduler_s_events_reach_a_subscriber(context: zmq.Context[Any]) -> None:
    """What a real scheduler records is what arrives."""
    from jaxengine.sched.request import Request
    from jaxengine.sched.scheduler import Scheduler

    sched_sizes = Scheduler(
        SchedulerSizes(
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=64,
            block_size=4,
            num_blocks=16,
        ),
        record_events=True,
    )
    sched_sizes.add(Request("a", list(range(12)), max_tokens=4, eos_token_ids=()))
    assert sched_sizes.schedule() is not None
    address = f"tcp://127.0.0.1:{_port()}"
    publisher = KVEventPublisher(KVEventsConfig(True, address, topic="kv"))
    try:
        subscriber = _socket(context, zmq.SUB, address)
        _subscribed(publisher, subscriber)
        publisher.publish(sched_sizes.take_events())
        [stored] = decode(subscriber.recv_multipart()[2]).events
        assert isinstance(stored, Stored)
        assert stored.token_ids == list(range(12)) and len(stored.block_hashes) == 3
        assert stored.block_size == 4 and stored.parent_block_hash is None
    finally:
        publisher.close()


def test_settings() -> None:
    assert parse_kv_events_config(None) == KVEventsConfig()
    assert KVEventsConfig().endpoint == "tcp://127.0.0.1:5557"
    assert parse_kv_events_config({"enable": True, "max_queue_size": 7}).max_queue_size == 7
    assert not parse_kv_events_config({"enable": True, "publisher": "null"}).enable
    assert parse_kv_events_config({"enable": True, "publisher": None}).enable
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "t", "hwm": 5}'
    assert parse_kv_events_config(text) == KVEventsConfig(True, topic="t", hwm=5)
    assert parse_kv_events_config({"enable": True, "replay_endpoint": None}).enable


@pytest.mark.parametrize(
    "value,named",
    [
        ("{", "kv_events_config is not JSON"),
        ("[]", "must be a JSON object"),
        ({"port": 5}, "kv_events_config.port is not known"),
        ({"enable": 1}, "kv_events_config.enable must be bool"),
        ({"buffer_steps": True}, "kv_events_config.buffer_steps must be int"),
        ({"buffer_steps": 0}, "kv_events_config.buffer_steps must be at least 1"),
        ({"endpoint": None}, "kv_events_config.endpoint must be str"),
        ({"publisher": "kafka"}, "kv_events_config.publisher"),
        ({"topic": "t" * 1024}, "kv_events_config.topic must have less than 1024 bytes"),
        ({"endpoint": "5557"}, "kv_events_config.endpoint must be an address"),
        ({"replay_endpoint": "tcp://*"}, "kv_events_config.replay_endpoint must be an address"),
        ({"endpoint": "tcp://*:99999"}, "kv_events_config.endpoint: 99999 is no port"),
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
        head, _, port = address.rpartition(":")
        with pytest.raises(ValueError, match=f"cannot bind {address}"):  # what it really is
            KVEventPublisher(KVEventsConfig(True, f"{head}:{int(port) - 1}"), rank=1)


def test_an_open_endpoint_is_said_to_be_one(caplog: pytest.LogCaptureFixture) -> None:
    KVEventPublisher(KVEventsConfig(True, "tcp://127.0.0.1:*")).close()
    assert not caplog.records
    KVEventPublisher(KVEventsConfig(True, "tcp://127.0.0.1:*", "tcp://*:*")).close()
    [record] = caplog.records
    assert "whoever reaches tcp://*:* can read the tokens of all prompts" in record.getMessage()
