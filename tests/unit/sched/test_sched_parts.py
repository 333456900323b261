"""Pool, hashes, queues, rows and events, each alone."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.sched.block_pool import BlockPool
from jaxengine.sched.hashing import extend_hashes, hash_function, root_hash, salt_extra
from jaxengine.sched.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Union
from jaxengine.sched.queue import make_queue
from jaxengine.sched.request import Request
from jaxengine.sched.rows import fit_budget


def test_pool_evicts_lazily_from_the_head() -> None:
    pool = BlockPool(3)
    a, b, c = pool.take(3)
    pool.register(a, 0, b"A")
    pool.register(b, 0, b"B")
    pool.release([b, a])
    assert pool.lookup(0, b"A") == a and pool.lookup(1, b"A") is None
    pool.touch([a])
    assert pool.count_free([a, b, c]) == 1
    assert pool.take(1) == [b] and pool.lookup(0, b"B") is None
    pool.check([1, 1, 1])


def test_pool_holds_duplicates_of_a_block() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block in blocks:
        pool.register(block, 0, b"same")
    pool.check([1, 1, 1, 0])
    for gone in blocks[:2]:
        pool.unregister(gone)
        assert pool.lookup(0, b"same") not in (None, gone)
        pool.check([1, 1, 1, 0])
    pool.unregister(blocks[2])
    pool.unregister(blocks[2])
    assert pool.lookup(0, b"same") is None


def test_pool_check_names_what_is_broken() -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(AssertionError, match="block 0: ref 1, owned 2 times"):
        pool.check([2, 0])
    pool.hash_of[0] = (0, b"x")
    with pytest.raises(AssertionError, match="hash map"):
        pool.check([1, 0])


def chain(tokens: list[int], size: int = 4, algo: str = "sha256", salt: str | None = None) -> list:
    hashes: list[bytes] = []
    ids = np.array(tokens, np.int32)
    extend_hashes(hashes, ids, size, hash_function(algo), root_hash(algo, "s"), salt_extra(salt))
    return hashes


@pytest.mark.parametrize("algo", ["sha256", "xxhash"])
def test_hash_chain(algo: str) -> None:
    tokens = list(range(13))
    whole = chain(tokens, algo=algo)
    assert len(whole) == 3 and len(set(whole)) == 3
    assert whole == chain(tokens, algo=algo)
    assert chain(tokens[:8], algo=algo) == whole[:2]
    other = chain([99, *tokens[1:]], algo=algo)
    assert not set(other) & set(whole)  # everything behind a difference differs
    assert not set(chain(tokens, algo=algo, salt="a")) & set(whole)
    assert chain(tokens, algo=algo, salt="a") != chain(tokens, algo=algo, salt="b")


def test_hashes_grow_with_the_tokens() -> None:
    hashes: list[bytes] = []
    ids = np.arange(32, dtype=np.int32)
    digest, root = hash_function("sha256"), root_hash("sha256", "")
    for length in range(33):
        extend_hashes(hashes, ids[:length], 4, digest, root)
        assert len(hashes) == length // 4
    at_once: list[bytes] = []
    extend_hashes(at_once, ids, 4, digest, root)
    assert hashes == at_once


def test_roots() -> None:
    assert root_hash("sha256", "") == root_hash("sha256", "")
    assert root_hash("sha256", "a") != root_hash("sha256", "")
    assert root_hash("xxhash", "a") == root_hash("xxhash", "a")
    assert root_hash("xxhash", "") != root_hash("xxhash", "")


def make(name: str, priority: int = 0, arrival: float = 0.0) -> Request:
    return Request(name, [1], max_tokens=1, priority=priority, arrival_time=arrival)


def test_fcfs_queue() -> None:
    queue = make_queue("fcfs")
    a, b, c = make("a"), make("b"), make("c")
    for r in (a, b, c):
        queue.add(r)
    assert queue.pop() is a
    queue.prepend(a)
    assert list(queue) == [a, b, c] and queue.peek() is a
    queue.remove({b})
    assert list(queue) == [a, c] and len(queue) == 2


def test_priority_queue() -> None:
    queue = make_queue("priority")
    a, b, c, d = make("a", 1, 5.0), make("b", 0, 9.0), make("c", 1, 4.0), make("d", 1, 5.0)
    for r in (d, a, b, c):
        queue.add(r)
    assert list(queue) == [b, c, a, d]
    assert queue.pop() is b and queue.peek() is c
    queue.prepend(b)
    queue.remove({c})
    assert [queue.pop() for _ in range(len(queue))] == [b, a, d]


def test_budget_goes_out_in_order() -> None:
    n = np.array([1, 5, 0, 4, 1], np.int32)
    assert fit_budget(n, 11).tolist() == [1, 5, 0, 4, 1]
    assert fit_budget(n, 8).tolist() == [1, 5, 0, 2, 0]
    assert fit_budget(n, 0).tolist() == [0, 0, 0, 0, 0]


def test_what_one_pool_forgets_others_may_have() -> None:
    """Subscribers know an engine, not its shards."""
    union = Union(2)
    both = BlockStored([b"a", b"b"], None, [1, 2, 3, 4], 2)
    assert union.take(0, [both]) == [both] == union.take(1, [both])
    own = BlockStored([b"c"], b"b", [5, 6], 2)
    union.take(0, [own])
    assert union.take(0, [BlockRemoved([b"b", b"c"])]) == [BlockRemoved([b"c"])]
    assert union.take(1, [BlockRemoved([b"b"])]) == [BlockRemoved([b"b"])]
    union.take(1, [own])
    assert union.take(1, [AllBlocksCleared()]) == [BlockRemoved([b"c"])]
    assert union.take(0, [AllBlocksCleared()]) == [AllBlocksCleared()]
    other = BlockStored([b"a"], None, [1, 2], 2, group_idx=1)  # another group's block, same name
    union.take(0, [BlockStored([b"a"], None, [1, 2], 2)])
    union.take(1, [other])
    assert union.take(0, [BlockRemoved([b"a"])]) == [BlockRemoved([b"a"])]
