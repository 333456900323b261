"""Times of sampled KV blocks."""

from __future__ import annotations

import pytest

from jaxengine.sched.block_pool import BlockPool
from jaxengine.sched.residency import Residency


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pool_of(size: int, share: float = 1.0) -> tuple[BlockPool, Clock]:
    pool, clock = BlockPool(size, residency_share=share), Clock()
    pool.residency = Residency(share, clock)
    return pool, clock


def test_a_block_is_given_out_used_again_and_evicted() -> None:
    pool, clock = pool_of(2)
    [block] = pool.take(1)
    pool.register(block, 0, b"a")
    pool.release([block])
    clock.now = 3.0
    pool.touch([block])
    pool.release([block])
    clock.now = 10.0
    assert sorted(pool.take(2)) == [0, 1]
    assert pool.residency is not None
    assert pool.residency.take() == {
        "lifetime": [10.0],
        "idle_before_evict": [7.0],
        "reuse_gap": [3.0],
    }
    assert pool.residency.take() == {"lifetime": [], "idle_before_evict": [], "reuse_gap": []}


def test_blocks_that_nobody_could_find_are_not_evicted() -> None:
    pool, clock = pool_of(1)
    for _ in range(3):
        clock.now += 1
        pool.release(pool.take(1))
    assert pool.residency is not None
    assert not any(pool.residency.take().values())


def test_a_share_of_the_blocks_is_watched() -> None:
    pool, clock = pool_of(100, 0.1)
    blocks = pool.take(100)
    for i, block in enumerate(blocks):
        pool.register(block, 0, bytes([i]))
    pool.release(blocks)
    clock.now = 1.0
    pool.take(100)
    assert pool.residency is not None
    assert pool.residency.take()["lifetime"] == [1.0] * 10


def test_what_nobody_takes_is_bounded() -> None:
    residency = Residency(1.0, Clock())
    for _ in range(10_000):
        residency.given(0, evicted=True)
    assert len(residency.take()["lifetime"]) == 4096


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_shares_are_checked(share: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        Residency(share)
    assert BlockPool(2).residency is None
