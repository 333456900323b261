"""What coupled ranks agree on: from wishes to one shape for all; and the sockets between them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
import zmq

from jaxengine.engine.coupled.exchange import (
    Agreement,
    Combiner,
    Exchange,
    PeerLostError,
    Plan,
    Wish,
)
from jaxengine.executor.coupling import Interrupted, exchange_address, free_port
from jaxengine.sched.batch import Bucket
from jaxengine.sched.buckets import Overlap, all_buckets
from jaxengine.sched.shapes import ProgramKey, ShapeChooser, StepShapes
from jaxengine.settings.coupling import Member

BUCKETS = all_buckets(4, 64)  # decode 1, 2, 4; mixed 64
ROWS = (1, 2, 4)
ALL: list[ProgramKey] = [
    *(("forward", b) for b in BUCKETS),
    *(("sample", n) for n in ROWS),
    ("seed", 0),
]


def combiner(size: int = 2, overlap: Overlap | None = None) -> Combiner:
    return Combiner(
        size,
        lambda ready, start: ShapeChooser(StepShapes(BUCKETS, ROWS, overlap), ready, start).choose,
    )


def decode(rows: int) -> Plan:
    return Plan(rows, rows, True, rows)


def wish(
    plan: Plan | None = None, ready: list[ProgramKey] | None = None, work: bool = True
) -> Wish:
    return Wish(1, 0, work, plan, ready, True)


def test_the_largest_rank_gives_the_shape() -> None:
    both = combiner()
    agreed = both.combine([wish(decode(1), ALL), wish(decode(3), ALL)])
    assert agreed.shape == (Bucket(4, 4, True), 4)
    assert not agreed.cold and not agreed.start and agreed.warm
    # one prefill anywhere: a mixed step for all
    mixed = both.combine([wish(decode(1)), wish(Plan(9, 2, False, 9))])
    assert mixed.shape == (Bucket(64, 4, False), 2)


def test_a_rank_without_work_runs_what_the_others_need() -> None:
    agreed = combiner().combine([wish(None, ALL, work=False), wish(decode(2), ALL)])
    assert agreed.shape == (Bucket(2, 2, True), 2) and agreed.work == [False, True]


def test_nobody_has_a_plan() -> None:
    agreed = combiner().combine([wish(None, ALL), wish(None, ALL, work=False)])
    assert agreed.shape is None and agreed.work == [True, False]


def test_a_program_counts_when_all_have_it() -> None:
    both = combiner()
    small: ProgramKey = ("forward", Bucket(1, 1, True))
    lacks = [key for key in ALL if key != small]
    agreed = both.combine([wish(decode(1), ALL), wish(None, lacks)])
    # the next larger one is ready everywhere; the right one is begun
    assert agreed.shape == (Bucket(2, 2, True), 2) and agreed.start == [small]
    assert not agreed.cold
    agreed = both.combine([wish(decode(1)), wish(None, ALL)])  # news of one rank
    assert agreed.shape == (Bucket(1, 1, True), 1) and not agreed.start


def test_nothing_is_compiled_yet() -> None:
    agreed = combiner().combine([wish(decode(1), []), wish(None, [])])
    assert agreed.shape == (Bucket(1, 1, True), 1) and agreed.cold
    assert set(agreed.start) == {("forward", Bucket(1, 1, True)), ("sample", 1)}


def test_small_programs_of_one_rank_are_waited_for_by_all() -> None:
    plan = Plan(9, 1, False, 9, True, ["score"])
    agreed = combiner().combine([wish(None, ALL), wish(plan, ALL)])
    assert agreed.cold and agreed.start == [("score", 64)]  # seed is ready


def test_overlap_needs_tokens_on_every_rank() -> None:
    both = combiner(overlap=Overlap(2, 2))
    ready = ALL + [("forward", Bucket(4, 4, True, dbo=True))]
    agreed = both.combine([wish(decode(4), ready), wish(decode(4), ready)])
    assert agreed.shape is not None and agreed.shape[0].dbo
    agreed = both.combine([wish(decode(4)), wish(None)])
    assert agreed.shape is not None and not agreed.shape[0].dbo


# -- the sockets ----------------------------------------------------------------------------


def never() -> None:
    """Nothing else ends the wait."""


def ends(size: int) -> list[Exchange]:
    port = free_port()
    return [
        Exchange(Member(rank, size, port), combiner(size) if rank == 0 else None)
        for rank in range(size)
    ]


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_all_get_the_same_answer() -> None:
    ranks = ends(3)
    got: dict[int, list[Agreement]] = {0: [], 1: [], 2: []}

    def run(rank: int) -> None:
        for number in range(1, 21):
            plan = decode(1 + (rank + number) % 4) if (rank + number) % 3 else None
            wished = Wish(number, 7, plan is not None, plan, ALL if number == 1 else None)
            got[rank].append(ranks[rank].agree(wished, never, 10))
        ranks[rank].close()

    threads = [beside(lambda rank=rank: run(rank)) for rank in range(3)]  # type: ignore[misc]
    for thread in threads:
        thread.join(20)
    assert got[0] == got[1] == got[2]
    assert [a.round for a in got[0]] == list(range(1, 21))
    assert all(a.waves == [7, 7, 7] and a.shape is not None for a in got[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_breaks_the_group(rank: int) -> None:
    ranks = ends(2)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="no word from rank 1|rank 0 gave no answer"):
        ranks[rank].agree(wish(), never, 0.2)
    assert time.monotonic() - began < 8
    for one in ranks:
        one.close()


def test_the_wait_ends_when_the_rank_is_told_to_stop() -> None:
    ranks = ends(2)

    def look() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        ranks[1].agree(wish(), look, 10)
    for one in ranks:
        one.close()


# -- strangers ------------------------------------------------------------------------------


def test_what_no_rank_said_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Names of none of the others, rank 0's own among them, and messages that are no wish."""
    ranks = ends(2)
    port = ranks[0]._member.port
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    strangers = []
    for name in (f"rank 0 of {port}", f"rank 2 of {port}", "\x1b[2J\nrank 1", "y" * 200):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, name.encode())
        stranger.connect(exchange_address(port))
        stranger.send(b"\xc1 is not msgpack")
        stranger.send_multipart([b"two", b"parts"])
        strangers.append(stranger)
    ranks[1]._socket.send(b"\xc1")
    ranks[1]._socket.send_multipart([b"two", b"parts"])
    got: list[Agreement] = []
    with caplog.at_level(logging.WARNING):
        # All that the strangers say is read before the wish of rank 1 comes.
        first = beside(lambda: got.append(ranks[0].agree(wish(decode(1), ALL), never, 20)))
        until(lambda: ranks[0]._strangers.num_ignored == 10)
        second = beside(lambda: got.append(ranks[1].agree(wish(decode(1), ALL), never, 20)))
        first.join(20)
        second.join(20)
    assert len(got) == 2 and got[0] == got[1] and got[0].shape == (Bucket(1, 1, True), 1)
    assert len(caplog.records) == 1  # in a minute
    assert caplog.messages[0].isprintable()
    context.destroy(linger=0)
    for one in ranks:
        one.close()


def test_a_message_without_end_is_not_read() -> None:
    ranks = ends(2)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(exchange_address(ranks[0]._member.port))
    stranger.send(bytes(17 * 2**20))
    disconnected = monitor.poll(15_000)
    stranger.disable_monitor()
    context.destroy(linger=0)
    for one in ranks:
        one.close()
    assert disconnected, "it was read"


def until(check: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
