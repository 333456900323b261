"""Tokens and blocks for the running requests: they go before all who wait."""

from __future__ import annotations

import numpy as np

from jaxengine.sched.queue import rank
from jaxengine.sched.request import Request
from jaxengine.sched.rows import fit_budget, wanted
from jaxengine.sched.state import SchedulerState, preempt


def schedule_running(state: SchedulerState, budget: int) -> int:
    """Write `table.num_scheduled` of every running request, in order; preempt where blocks are
    short. Returns the tokens given."""
    table, slots = state.table, state.running_slots()
    if not len(slots):
        return 0
    n = wanted(table, slots)
    if state.config.num_cohorts > 1:
        n[table.cohort[slots] != state.cohort] = 0
    threshold = state.config.long_prefill_token_threshold
    if threshold and state.contended():
        np.minimum(n, threshold, out=n)
    n = fit_budget(n, budget)
    table.num_scheduled[slots] = n
    total = table.num_computed[slots] + n
    short = total > table.num_blocks[slots] * state.config.block_size
    if not short.any():
        return int(n.sum())
    rows = np.flatnonzero(short)
    for slot in slots[rows].tolist() if state.kv.has_windows else ():
        state.kv.release_window(slot)
    if state.kv.grow_each(slots[rows], total[rows]):
        return int(n.sum())
    requests = state.running.copy()  # preemptions change the list
    for i in rows.tolist():
        _grow(state, requests[i], int(total[i]))
    return int(table.num_scheduled[slots].sum())


def _grow(state: SchedulerState, request: Request, total: int) -> None:
    """Have blocks for `total` tokens of a request, at the cost of others if need be."""
    slot, scheduled = request.slot, state.table.num_scheduled
    if slot < 0 or scheduled[slot] == 0:  # preempted a moment ago
        return
    while not state.kv.grow(slot, total):
        if len(state.running) == 1:
            # Nobody to preempt: a smaller chunk, or nothing until the steps in flight (or the
            # loads) let go of their blocks. `Scheduler.add` made sure that one token will fit.
            scheduled[slot] = min(int(scheduled[slot]), state.kv.spare_tokens(slot))
            state.kv.grow(slot, int(state.table.num_computed[slot] + scheduled[slot]))
            return
        victim = state.running[-1]
        if state.config.policy == "priority":
            victim = max(state.running, key=rank)
        preempt(state, victim)
        if victim is request:
            return
