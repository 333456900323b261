"""Host books, page files, the manager's traffic between tiers."""

from __future__ import annotations

import pathlib
import threading
import time

import numpy as np
import pytest

from jaxengine.offload.counters import Counters
from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.keys import group_of, make_key, namespace_key
from jaxengine.offload.layout import KVLayout
from jaxengine.offload.manager import OffloadManager
from jaxengine.offload.policies import make_policy
from jaxengine.offload.tiers.fs import FsStore
from jaxengine.offload.tiers.host import HostTier, State
from jaxengine.offload.tiers.page_file import PageError, check_page, header_of, parse_whole
from jaxengine.offload.tiers.worker import TierWorker

PAGE = 96
SPACE = namespace_key({"model": "test"})


def key_of(i: int) -> bytes:
    return make_key(i.to_bytes(32, "big"), 0)


def page_of(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, PAGE, np.uint8)


def host_of(slots: int, policy: str = "lru") -> HostTier:
    return HostTier(PagePool(slots, PAGE), make_policy(policy, slots))


def fill(manager: OffloadManager, numbers: range) -> None:
    reserved = manager.prepare_store([key_of(i) for i in numbers])
    assert reserved is not None
    for i, slot in zip(numbers, reserved.slots, strict=True):
        manager.host.pool.view(slot)[:] = page_of(i)
    manager.complete_store(reserved.slots, True)


def settle(manager: OffloadManager, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while manager.num_pending:
        manager.poll()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_keys_and_namespaces() -> None:
    assert group_of(make_key(b"h" * 32, 7)) == 7
    facts = {"model": "m", "dtype": "bfloat16", "rope": {"theta": 1e4}}
    assert namespace_key(facts) == namespace_key(dict(reversed(facts.items())))
    others = [{**facts, name: "other"} for name in facts]
    assert len({namespace_key(f) for f in [facts, *others]}) == 4


def test_layout_facts_tell_what_matters() -> None:
    """B39: the arrangement on the device is no part of a page, everything else is."""
    base = KVLayout((0, 0), 16, 2, 8, "bfloat16")
    assert base.page_bytes(0) == 2 * 2 * 2 * 16 * 8 * 2
    assert base.facts() == KVLayout((0, 0), 16, 2, 8, "bfloat16", "head_major").facts()
    others = [
        KVLayout((0, 0), 32, 2, 8, "bfloat16"),
        KVLayout((0, 0), 16, 4, 4, "bfloat16"),
        KVLayout((0, 0), 16, 2, 8, "float16"),
        KVLayout((0, 1), 16, 2, 8, "bfloat16"),
    ]
    assert len({namespace_key(layout.facts()) for layout in [base, *others]}) == 5
    with pytest.raises(ValueError, match="layer_group must name groups"):
        KVLayout((0, 2), 16, 2, 8, "bfloat16")


def test_host_never_evicts_what_is_read_written_or_offered() -> None:
    host = host_of(4)
    first = host.reserve([key_of(0), key_of(1)])
    assert first is not None and host.lookup(key_of(0)) is State.PENDING
    assert host.pin([key_of(0)]) is None
    host.commit(first.slots, True)
    pinned = host.pin([key_of(0)])
    assert pinned is not None
    second = host.reserve([key_of(i) for i in (2, 3)])
    assert second is not None
    assert host.reserve([key_of(4), key_of(5)]) is None  # one reads, two write
    third = host.reserve([key_of(1), key_of(0), key_of(2)])
    assert third is not None and third.slots == []
    fourth = host.reserve([key_of(6)])
    assert fourth is not None and fourth.evicted == [key_of(1)]
    host.unpin(pinned)
    host.commit([*second.slots, *fourth.slots], False)
    host.check()
    assert len(host) == 1 and host.num_busy == 0


def test_cleared_slots_are_free_when_their_users_are_done() -> None:
    host = host_of(3)
    written = host.reserve([key_of(0), key_of(1)])
    assert written is not None
    host.commit(written.slots[:1], True)
    pinned = host.pin([key_of(0)])
    host.clear()
    assert host.lookup(key_of(0)) is State.MISS and host.lookup(key_of(1)) is State.MISS
    again = host.reserve([key_of(0)])
    assert again is not None and not set(again.slots) & set(written.slots)
    assert host.reserve([key_of(5)]) is None
    assert pinned is not None
    host.unpin(pinned)
    assert host.commit(written.slots[1:], True) == []
    assert host.reserve([key_of(5), key_of(6)]) is not None
    host.check()


def test_shared_pool() -> None:
    pool = PagePool(3, 100, shared=True)
    address = pool.address
    try:
        other = PagePool.attach(address, 3, 100)
        other.view(2)[:] = 9
        assert (pool.view(2) == 9).all() and not pool.view(1).any()
        with pytest.raises(ValueError, match="expected"):
            PagePool.attach(address, 4, 100)
    finally:
        pool.close()
    with pytest.raises(OSError):
        PagePool.attach(address, 3, 100)
    assert (other.view(2) == 9).all()


def test_page_header_names_its_page() -> None:
    page = page_of(1)
    header = header_of(SPACE, key_of(1), page)
    check_page(header, SPACE, key_of(1), page)
    assert parse_whole(header + page.tobytes()) == (SPACE, key_of(1))
    changed = page.copy()
    changed[17] ^= 1
    other = namespace_key({"model": "other"})
    for arguments in [
        (header, SPACE, key_of(1), changed),
        (header, other, key_of(1), page),
        (header, SPACE, key_of(2), page),
        (header, SPACE, key_of(1), page[:-1]),
        (header[:-1], SPACE, key_of(1), page),
    ]:
        with pytest.raises(PageError):
            check_page(*arguments)
    whole = bytearray(header + page.tobytes())
    for i in range(len(whole)):
        whole[i] ^= 0x40
        with pytest.raises(PageError):
            parse_whole(bytes(whole))
        whole[i] ^= 0x40


def test_blocks_go_down_and_come_back(tmp_path: pathlib.Path) -> None:
    counters = Counters()
    store = FsStore(tmp_path, SPACE, 10**6, counters)
    manager = OffloadManager(
        host_of(8), [TierWorker("fs", store, counters)], lambda group: PAGE, counters
    )
    fill(manager, range(8))
    settle(manager)
    fill(manager, range(8, 16))  # evicts the first ones
    settle(manager)
    assert manager.lookup(key_of(0)) is State.MISS
    search = manager.search([key_of(i) for i in (0, 1, 99, 2)], in_order=True)
    settle(manager)
    assert search.stage == "asked" and set(search.found) == {key_of(0), key_of(1)}
    manager.fetch(search, [key_of(0), key_of(1)])
    settle(manager)
    assert search.stage == "done"
    slots = manager.prepare_load([key_of(0), key_of(1)])
    assert slots is not None
    for i, slot in enumerate(slots):
        assert (manager.host.pool.view(slot) == page_of(i)).all()
    manager.complete_load(slots)
    stats = manager.stats()
    assert stats["fs_hits"] == 2 and stats["fs_write_bytes"] == 16 * PAGE
    manager.host.check()
    manager.close()


class SlowStore:
    """Lets nothing through until told."""

    writable = True

    def __init__(self) -> None:
        self.gate = threading.Event()

    def contains(self, keys: list[bytes], stop_at_miss: bool) -> list[bool]:
        raise RuntimeError("broken")

    def read(self, keys: list[bytes], into: list[np.ndarray]) -> list[bool]:
        raise RuntimeError("broken")

    def write(self, key: bytes, data: np.ndarray) -> bool:
        return self.gate.wait(10)

    def delete(self, key: bytes) -> None:
        raise RuntimeError("broken")

    def close(self) -> None:
        self.gate.set()


def test_a_slow_tier_blocks_nobody_and_a_broken_one_ends_nothing() -> None:
    counters = Counters()
    store = SlowStore()
    worker = TierWorker("slow", store, counters, threads=1, max_queue=2)  # type: ignore[arg-type]
    manager = OffloadManager(host_of(16), [worker], lambda group: PAGE, counters)
    began = time.monotonic()
    fill(manager, range(16))
    assert time.monotonic() - began < 5  # a write of the tier takes 10 s
    assert counters.get("slow_dropped_writes") >= 13
    assert 2 <= manager.host.num_busy <= 3  # only what waits is pinned
    fill(manager, range(16, 26))
    store.gate.set()
    settle(manager)
    assert manager.host.num_busy == 0
    search = manager.search([key_of(99)], in_order=False)
    manager.discard([key_of(20)])
    settle(manager)
    assert search.stage == "asked" and not search.found
    assert counters.get("slow_contains_exceptions") == 1
    assert counters.get("slow_delete_exceptions") == 1
    manager.close()


def test_a_broken_tier_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    worker = TierWorker("slow", SlowStore(), counters)  # type: ignore[arg-type]
    for token in range(20):
        worker.ask(token, [key_of(1)], False)
    deadline = time.monotonic() + 10
    while counters.get("slow_contains_exceptions") < 20:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(caplog.records) == 1 and "RuntimeError: broken" in caplog.text
    worker.close()


class GatedStore:
    """Keeps what it is given, each write as soon as the gate is open."""

    writable = True

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.blocks: set[bytes] = set()

    def contains(self, keys: list[bytes], stop_at_miss: bool) -> list[bool]:
        return [key in self.blocks for key in keys]

    def read(self, keys: list[bytes], into: list[np.ndarray]) -> list[bool]:
        return [False] * len(keys)

    def write(self, key: bytes, data: np.ndarray) -> bool:
        assert self.gate.wait(20)
        self.blocks.add(key)
        return True

    def delete(self, key: bytes) -> None:
        self.blocks.discard(key)

    def close(self) -> None:
        self.gate.set()


@pytest.mark.parametrize("max_queue", [1, 2, 64])
def test_what_proved_wrong_leaves_a_tier_that_was_still_writing_it(max_queue: int) -> None:
    """Neither a write under way nor a full queue lets a wrong block stay."""
    counters = Counters()
    store = GatedStore()
    worker = TierWorker("gated", store, counters, threads=3, max_queue=max_queue)  # type: ignore[arg-type]
    manager = OffloadManager(host_of(16), [worker], lambda group: PAGE, counters)
    fill(manager, range(8))
    manager.discard([key_of(i) for i in range(8)])
    assert manager.num_pending
    manager.poll()
    store.gate.set()
    settle(manager)
    assert store.blocks == set()
    fill(manager, range(1))  # computed anew, and stored anew
    settle(manager)
    assert store.blocks == {key_of(0)} and manager.host.num_busy == 0
    manager.close()


def test_deletes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxengine.offload.manager.MAX_DOOMED", 5)
    counters = Counters()
    store = GatedStore()
    worker = TierWorker("gated", store, counters)  # type: ignore[arg-type]
    manager = OffloadManager(host_of(16), [worker], lambda group: PAGE, counters)
    fill(manager, range(8))
    manager.discard([key_of(i) for i in range(8)])
    assert counters.get("gated_dropped_deletes") == 3
    store.gate.set()
    settle(manager)
    assert store.blocks == {key_of(i) for i in range(3)}
    manager.close()
