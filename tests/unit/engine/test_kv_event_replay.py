"""Replays that are asked for wrongly, too often, or by who does not read: bounded, and counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.engine import kv_event_replay, kv_events
from jaxengine.engine.kv_event_replay import END
from jaxengine.engine.kv_events import KVEventPublisher
from jaxengine.sched.kv_events import AllBlocksCleared, BlockStored, KVEvent
from jaxengine.settings.kv_events import KVEventsConfig


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def stored(tokens: int) -> list[KVEvent]:
    return [BlockStored([b"h"], None, list(range(tokens)), tokens)]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def make(**more: Any) -> KVEventPublisher:
    ends = ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    return KVEventPublisher(KVEventsConfig(True, *ends, topic="kv", **more))


@pytest.fixture(scope="module")
def publisher() -> Iterator[KVEventPublisher]:
    """With 20 batches, numbered from 0."""
    made = make()
    for tokens in range(20):
        made.publish(stored(tokens))
    wait_until(lambda: made.counts.get("kv_events_published") == 20)
    yield made
    made.close()


class Asker:
    def __init__(self, publisher: KVEventPublisher, queue: int = 1000) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 20_000
        self.socket.setsockopt(zmq.RCVHWM, queue)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(publisher.replay_endpoint)

    def ask(self, start: int) -> None:
        self.socket.send_multipart([b"", number(start)])

    def answers(self) -> list[int]:
        """The numbers of the batches up to the end."""
        found = []
        while (frames := self.socket.recv_multipart())[2] != END:
            assert frames[:2] == [b"", b"kv"] and msgspec.msgpack.decode(frames[3])
            found.append(int.from_bytes(frames[2], "big"))
        return found


GARBAGE: dict[str, list[bytes]] = {
    "empty": [b""],
    "no number": [b"", b""],
    "a short number": [b"", b"\0" * 7],
    "a long number": [b"", b"\0" * 9],
    "no empty frame": [number(0)],
    "something in the empty frame": [b"x", number(0)],
    "a frame too many": [b"", number(0), b""],
    "100,000 frames": [b""] * 100_000,
    "deep msgpack": [b"", b"\x91" * 1000],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_counted_and_the_next_request_answered(
    publisher: KVEventPublisher, frames: list[bytes]
) -> None:
    before = publisher.counts.get("kv_events_bad_requests")
    asker = Asker(publisher)
    asker.socket.send_multipart(frames)
    wait_until(lambda: publisher.counts.get("kv_events_bad_requests") == before + 1)
    asker.ask(18)
    assert asker.answers() == [18, 19]
    asker.socket.close()


def test_a_frame_without_end_costs_its_connection_only(publisher: KVEventPublisher) -> None:
    sender = Asker(publisher)
    sender.socket.send_multipart([b"", bytes(10 * 2**20)])
    asker = Asker(publisher)
    asker.ask(19)
    assert asker.answers() == [19]
    assert publisher.counts.get("kv_events_bad_requests") < 100
    sender.socket.close()
    asker.socket.close()


@settings(max_examples=20, deadline=None)
@given(
    sent=st.lists(st.lists(st.binary(max_size=12), min_size=1, max_size=4), min_size=1, max_size=20)
)
def test_no_mix_of_requests_ends_the_thread(
    publisher: KVEventPublisher, sent: list[list[bytes]]
) -> None:
    asker = Asker(publisher)
    for frames in sent:
        asker.socket.send_multipart(frames)
    asker.socket.close()
    other = Asker(publisher)
    other.ask(0)
    assert other.answers() == list(range(20))
    other.socket.close()


def test_the_greatest_number_and_one_beyond_the_last(publisher: KVEventPublisher) -> None:
    asker = Asker(publisher)
    for start in (20, 2**63, 2**64 - 1):
        asker.ask(start)
        assert asker.answers() == []
    asker.socket.close()


def test_a_failure_costs_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is left out, so that subscribers notice."""
    made = make()
    real = kv_events.encode_batch

    def encode(at: float, events: list[KVEvent], rank: int) -> bytes:
        if len(events) == 2:
            raise OverflowError("made to fail")
        return real(at, events, rank)

    monkeypatch.setattr(kv_events, "encode_batch", encode)
    for count in (1, 2, 1):
        made.publish([AllBlocksCleared()] * count)
    asker = Asker(made)
    wait_until(lambda: made.counts.get("kv_events_published") == 2)
    asker.ask(0)
    assert asker.answers() == [0, 2]
    assert made.counts.get("kv_events_dropped") == 1
    asker.socket.close()
    made.close()


def test_a_failed_answer_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    made.publish([AllBlocksCleared()])
    wait_until(lambda: made.counts.get("kv_events_published") == 1)
    replay = made._replay
    assert replay is not None

    def fail() -> None:
        replay.socket.recv_multipart()
        raise RuntimeError("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(replay, "take_request", fail)
        asker = Asker(made)
        asker.ask(0)
        wait_until(lambda: made.counts.get("kv_events_errors") == 1)
    asker.ask(0)
    assert asker.answers() == [0]
    made.publish([AllBlocksCleared()])
    wait_until(lambda: made.counts.get("kv_events_published") == 2)
    asker.socket.close()
    made.close()


def test_who_does_not_read_holds_little_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100 requests for everything, none read: one replay is under way, and it waits."""
    monkeypatch.setattr(kv_event_replay, "STALL", 3.0)
    made = make()
    for _ in range(500):
        made.publish(stored(20_000))  # 60 kB
    wait_until(lambda: made.counts.get("kv_events_published") == 500)
    slow, quick = Asker(made, queue=1), Asker(made)
    for _ in range(100):
        slow.ask(0)
    replay = made._replay
    assert replay is not None
    wait_until(lambda: replay.num_active == 1)
    quick.ask(0)
    assert quick.answers() == list(range(500))
    sent = made.counts.get("kv_events_replayed") - 500
    assert sent < 500 and replay.num_active == 1
    wait_until(lambda: made.counts.get("kv_events_replays_lost") == 1)  # it is given up
    assert replay.num_active == 0
    slow.socket.close()
    quick.socket.close()
    made.close()


def test_a_new_request_takes_the_place_of_the_old(publisher: KVEventPublisher) -> None:
    """Whatever is asked meanwhile: the last request is answered whole."""
    asker = Asker(publisher)
    for start in (0, 5, 19, 3):
        asker.ask(start)
    found: list[int] = []
    while found[-17:] != list(range(3, 20)):
        frames = asker.socket.recv_multipart()
        if frames[2] != END:
            found.append(int.from_bytes(frames[2], "big"))
    asker.socket.close()


def test_the_number_of_replays_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_replay, "MAX_REPLAYS", 3)
    made = make()
    for _ in range(300):
        made.publish(stored(20_000))
    wait_until(lambda: made.counts.get("kv_events_published") == 300)
    slow = [Asker(made, queue=1) for _ in range(5)]
    for asker in slow:
        asker.ask(0)
    wait_until(lambda: made.counts.get("kv_events_replays_refused") == 2)
    replay = made._replay
    assert replay is not None and replay.num_active == 3
    for asker in slow:
        asker.socket.close()
    other = Asker(made)
    wait_until(lambda: replay.num_active == 0)  # all are gone
    other.ask(299)
    assert other.answers() == [299]
    other.socket.close()
    made.close()


def test_more_than_the_queue_holds_is_a_gap_in_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make(max_queue_size=4)
    gate = threading.Event()
    real = kv_events.encode_batch

    def encode(at: float, events: list[KVEvent], rank: int) -> bytes:
        assert gate.wait(20)
        return real(at, events, rank)

    monkeypatch.setattr(kv_events, "encode_batch", encode)
    made.publish(stored(0))
    wait_until(lambda: made._queue.qsize() == 0)  # the thread has it
    for tokens in range(1, 11):
        made.publish(stored(tokens))
    assert made.counts.get("kv_events_dropped") == 6
    gate.set()
    wait_until(lambda: made.counts.get("kv_events_published") == 5)
    made.publish(stored(11))
    wait_until(lambda: made.counts.get("kv_events_published") == 6)
    asker = Asker(made)
    asker.ask(0)
    assert asker.answers() == [0, 1, 2, 3, 4, 11]
    asker.socket.close()
    made.close()
