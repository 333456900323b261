"""The invariants of the scheduler, checked. For tests and for a doctor, not for the hot path."""

from __future__ import annotations

import numpy as np

from jaxengine.sched.request import Request, RequestStatus
from jaxengine.sched.state import SchedulerState


def check_integrity(state: SchedulerState, num_in_flight_steps: int) -> None:
    """Raises AssertionError that names what is broken."""
    waiting = list(state.waiting)
    _check_places(state, waiting)
    _check_blocks(state)
    for request in state.requests.values():
        _check_counters(state, request)
        if num_in_flight_steps == 0:
            in_flight = request.num_in_flight_tokens, request.num_output_placeholders
            assert in_flight == (0, 0), f"{request}: idle, but has {in_flight} in flight"


def _check_places(state: SchedulerState, waiting: list[Request]) -> None:
    loading = list(state.loading.values())
    placed = [*waiting, *state.running, *(r for r in loading if not r.is_finished)]
    assert len(set(placed)) == len(placed), "a request is in two places"
    assert set(placed) == set(state.requests.values()), "a request is in no place, or ended"
    assert all(r.slot < 0 for r in waiting), "a waiting request holds a slot"
    assert all(r.status is RequestStatus.RUNNING for r in state.running), "status of running"
    table = state.table
    held = [r.slot for r in [*state.running, *loading]]
    assert sorted(held + table.free) == list(range(table.num_slots)), "slots: free + held != all"
    for request in [*state.running, *loading]:
        assert table.owner[request.slot] is request, f"{request}: slot of somebody else"
    assert state.running_slots().tolist() == [r.slot for r in state.running], "slot order is stale"


def _check_blocks(state: SchedulerState) -> None:
    kv, table = state.kv, state.table
    null = kv.pool.null
    owners = np.zeros(null + 1, np.int64)
    for rows in kv.block_tables:
        for slot in range(table.num_slots):
            row, count = rows[slot], int(table.num_blocks[slot])
            assert table.owner[slot] is not None or count == 0, f"free slot {slot} owns blocks"
            assert (row[count:] == null).all(), f"slot {slot}: entries behind the table's end"
            owned = row[:count][row[:count] != null]
            assert len(np.unique(owned)) == len(owned), f"slot {slot}: a block twice in one row"
            np.add.at(owners, owned, 1)
    kv.pool.check(owners[:null].tolist())
    distinct = int((owners[:null] > 0).sum())
    assert kv.pool.num_free + distinct == null, "free blocks + owned blocks != all"


def _check_counters(state: SchedulerState, r: Request) -> None:
    stale, in_flight = r.num_stale_output_tokens, r.num_in_flight_tokens
    assert in_flight >= stale >= 0, f"{r}: {in_flight} tokens in flight, {stale} stale"
    assert r.drop_stale <= (stale > 0), f"{r}: drops stale output, but has none"
    assert r.num_output_placeholders >= 0, f"{r}: negative placeholders"
    assert r.num_tokens <= max(r.stop_length, r.num_prompt_tokens), f"{r}: past its stop length"
    reach = r.num_tokens + r.num_output_placeholders
    assert 0 <= r.num_computed_tokens <= reach, f"{r}: computed past what is known and booked"
    if r.slot >= 0:
        table, size = state.table, state.config.block_size
        assert table.pending[r.slot] >= 0, f"{r}: negative pending steps"
        room = int(table.num_blocks[r.slot]) * size
        assert r.num_computed_tokens <= room, f"{r}: computed without blocks"
        assert table.num_registered[r.slot] <= table.num_blocks[r.slot], f"{r}: registered too far"
    else:
        assert r.num_computed_tokens == 0, f"{r}: computed without a slot"
