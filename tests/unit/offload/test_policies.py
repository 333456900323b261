"""Eviction policies: what leaves, what it costs, and how they do on real traces."""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterable

import pytest
import testdata

from jaxengine.offload.policies import make_policy
from jaxengine.offload.policies.base import EvictionPolicy


def ready(policy: EvictionPolicy, slots: Iterable[int]) -> None:
    for slot in slots:
        policy.insert(slot, b"key %d" % slot)


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_evicts_the_oldest_that_may_go_all_or_nothing(name: str) -> None:
    policy = make_policy(name, 8)
    ready(policy, range(5))
    policy.touch(0, False)
    assert policy.evict(5, lambda slot: slot != 1) is None
    assert policy.evict(3, lambda slot: slot != 1) == [2, 3, 4]
    policy.remove(1)
    assert policy.evict(1, lambda slot: True) == [0]
    assert policy.evict(1, lambda slot: True) is None
    ready(policy, [7])
    policy.clear()
    ready(policy, [6])
    assert policy.evict(1, lambda slot: True) == [6]


def test_arc_keeps_what_came_back() -> None:
    policy = make_policy("arc", 8)
    ready(policy, range(4))
    policy.touch(0, True)  # another request
    policy.touch(1, False)  # the one that stored it
    assert policy.evict(3, lambda slot: True) == [2, 3, 1]
    assert policy.evict(1, lambda slot: True) == [0]


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="eviction_policy must be one of lru, arc, got 'fifo'"):
        make_policy("fifo", 8)


def hit_ratio(name: str, requests: list[list[int]], capacity: int) -> float:
    """Blocks found as a prefix, requests one by one, over the whole host tier."""
    from jaxengine.offload.host_pool import PagePool
    from jaxengine.offload.tiers.host import HostTier, State

    host = HostTier(PagePool(capacity, 1), make_policy(name, capacity))
    hits = total = 0
    for ids in requests:
        keys = [i.to_bytes(8, "big") for i in ids]
        total += len(keys)
        found = 0
        while found < len(keys) and host.lookup(keys[found]) is State.HIT:
            found += 1
        hits += found
        own: set[bytes] = set()
        for begin in range(found, len(keys), 64):
            reserved = host.reserve(keys[begin : begin + 64])
            if reserved is None:
                break
            host.commit(reserved.slots, True)
            own.update(reserved.keys)
        host.touch(reversed(keys), own)
    return hits / total


def trace(name: str) -> list[list[int]]:
    rows = [json.loads(line) for line in testdata.trace(name).read_text().splitlines()]
    if "session" in rows[0]:
        rows.sort(key=lambda row: (row["timestamp"], row["session"], row["step"]))
    return [row["hash_ids"] for row in rows]


def scan_polluted() -> list[list[int]]:
    """20 shared prompts that come back, among prompts that never do."""
    rng = random.Random(0)
    fresh = iter(range(10**6, 10**9))
    hot = [[1000 * i + j for j in range(20)] for i in range(20)]
    requests = []
    for turn in range(600):
        requests.append(rng.choice(hot) + [next(fresh) for _ in range(2)])
        if turn % 3 == 0:
            requests.append([next(fresh) for _ in range(120)])
    return requests


@pytest.mark.parametrize(
    "name, capacity",
    [
        ("scan", 500),
        ("mooncake_conversation_rows_1-2000.jsonl", 2000),
        ("mooncake_conversation_rows_1-2000.jsonl", 8000),
        ("mooncake_synthetic_rows_1-2000.jsonl", 2000),
        ("miniswe_agent_sessions_a.jsonl", 1000),
        ("miniswe_agent_sessions_a.jsonl", 2000),
        ("sharegpt_rows_1-200.jsonl", 1000),
    ],
)
def test_arc_against_lru(name: str, capacity: int, capsys: pytest.CaptureFixture[str]) -> None:
    requests = scan_polluted() if name == "scan" else trace(name)
    lru = hit_ratio("lru", requests, capacity)
    arc = hit_ratio("arc", requests, capacity)
    with capsys.disabled():
        print(f"\n{name}, {capacity} blocks: LRU {lru:.4f}, ARC {arc:.4f}")
    if name == "scan":
        assert arc > lru
    assert arc >= lru - 0.01


MEASURE = """
import sys, time, resource
from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.policies import make_policy
from jaxengine.offload.tiers.host import HostTier
name, count = sys.argv[1], int(sys.argv[2])
def used():
    fields = open("/proc/self/statm").read().split()
    return int(fields[1]) * resource.getpagesize()
before = used()
host = HostTier(PagePool(count, 1), make_policy(name, count))
digest = lambda i: i.to_bytes(8, "big") * 4 + bytes(4)
for begin in range(0, count + count // 2, 64):
    reserved = host.reserve([digest(i) for i in range(begin, begin + 64)])
    host.commit(reserved.slots, True)
bytes_used = used() - before
best = float("inf")
for begin in range(count, count + min(count // 2, 100_000) - 5000, 5000):
    keys = [digest(i) for i in range(begin, begin + 5000)]
    began = time.perf_counter()
    for key in keys:
        host.lookup(key)
    best = min(best, (time.perf_counter() - began) / len(keys))
print(bytes_used, len(host), best)
"""


def measure(name: str, count: int) -> tuple[float, float]:
    """(bytes a block, seconds a lookup) of a full tier with ghosts, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, name, str(count)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=pathlib.Path(__file__).resolve().parents[3],
    )
    assert done.returncode == 0, done.stderr
    used, blocks, seconds = done.stdout.split()
    return int(used) / int(blocks), float(seconds)


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_bytes_of_a_block(name: str) -> None:
    size, _ = measure(name, 64_000)
    assert size < 300


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lru", "arc"])
def test_a_million_blocks(name: str) -> None:
    """As small as a few, and found about as soon: sixteen times as many are no reason to search."""
    _, few = measure(name, 64_000)
    size, many = measure(name, 1_000_000)
    print(f"{name}: {size:.0f} bytes a block, {few * 1e6:.2f} and {many * 1e6:.2f} us a lookup")
    assert size < 300 and many < 8 * few
