"""The map of the pool says what the pool's own books say."""

from __future__ import annotations

from jaxengine.sched.block_map import CACHED, FREE, OWNED, SHARED, block_states
from jaxengine.sched.block_pool import BlockPool


def test_every_state() -> None:
    pool = BlockPool(6)
    assert block_states(pool).tolist() == [FREE] * 6
    first, second, third, fourth = pool.take(4)
    pool.register(first, 0, b"a")
    pool.register(second, 0, b"b")
    pool.touch([first])
    pool.release([second, third])  # one with contents, one without
    states = block_states(pool)
    assert [int(states[b]) for b in (first, second, third, fourth)] == [SHARED, CACHED, FREE, OWNED]
    assert (states == FREE).sum() + (states == CACHED).sum() == pool.num_free
    pool.clear_hashes()
    assert int(block_states(pool)[second]) == FREE
