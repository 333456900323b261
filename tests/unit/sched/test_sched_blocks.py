"""Blocks of the scheduler: prefixes, salts, events, windows."""

from __future__ import annotations

from planning import answer, config, planned, request

from jaxengine.sched.config import GroupSpec
from jaxengine.sched.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler


def test_salts_keep_prefixes_apart_and_counters_count_once() -> None:
    scheduler = Scheduler(config())
    tokens = list(range(17))
    for name, salt, hit in [("a", None, 0), ("b", None, 16), ("c", "x", 0), ("d", "x", 16)]:
        r = Request(name, tokens, max_tokens=1, cache_salt=salt)
        scheduler.add(r)
        answer(scheduler, planned(scheduler))
        assert r.num_cached_tokens == hit
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (4 * 17, 32)
    r = Request("e", tokens, max_tokens=1, skip_reading_prefix_cache=True)
    scheduler.add(r)
    answer(scheduler, planned(scheduler))
    assert r.num_cached_tokens == 0


def test_blocks_of_output_are_found_by_the_next_turn() -> None:
    scheduler = Scheduler(config())
    r = request("a", 6, 8)
    scheduler.add(r)
    flight = [planned(scheduler)]
    while scheduler.has_work():
        plan = scheduler.schedule()
        flight += [plan] if plan else []
        answer(scheduler, flight.pop(0))
    turn = Request("b", [*r.token_ids.tolist(), 1, 2, 3], max_tokens=1)
    scheduler.add(turn)
    planned(scheduler)
    assert turn.num_cached_tokens == 12  # 13 of 14 tokens had KV: the last sampled one has none


def test_reset_prefix_cache_needs_an_empty_pool() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a"))
    answer(scheduler, planned(scheduler))
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running=True)
    assert planned(scheduler).start.tolist() == [0]


def test_events_tell_what_is_stored_and_removed() -> None:
    scheduler = Scheduler(config(num_blocks=3, max_model_len=12), record_events=True)
    scheduler.add(Request("a", range(9), max_tokens=1))  # type: ignore[arg-type]
    answer(scheduler, planned(scheduler))
    (stored,) = scheduler.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == list(range(8)) and stored.parent_block_hash is None
    scheduler.add(request("b", 11))
    answer(scheduler, planned(scheduler))
    events = scheduler.take_events()
    removed = [e.block_hashes[0] for e in events if isinstance(e, BlockRemoved)]
    assert sorted(removed) == sorted(stored.block_hashes)
    scheduler.abort()
    assert scheduler.reset_prefix_cache()
    assert isinstance(scheduler.take_events()[-1], AllBlocksCleared)


def test_window_blocks_are_freed_by_processed_tokens() -> None:
    scheduler = Scheduler(config(groups=(GroupSpec(4),), max_num_batched_tokens=8))
    scheduler.add(request("a", 24))
    flight = [planned(scheduler)]
    (table,) = scheduler.block_tables
    flight.append(planned(scheduler))
    # 8 tokens are in flight and may still read everything they saw.
    assert (table[0, :4] < 64).all()
    answer(scheduler, flight.pop(0))
    flight.append(planned(scheduler))
    # 8 processed: the next token looks back to position 5, in block 1.
    assert (table[0, :6] < 64).tolist() == [False, True, True, True, True, True]
