"""What a step's result means for the requests that had a row in it."""

from __future__ import annotations

import numpy as np

from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.rows import Settled, settle
from jaxengine.sched.slots import Index
from jaxengine.sched.state import SchedulerState
from jaxengine.sched.updates import ERROR, Finish, UpdateBatch, cut_at_stop, finish_of

Ends = dict[int, Finish]  # by row of the plan


def reconcile(state: SchedulerState, plan: StepPlan, result: StepResult) -> UpdateBatch:
    """Settle counters, tokens and stops, and register full blocks. Ending the finished requests
    is left to the caller."""
    table = state.table
    slots: Index = plan.slots.astype(np.intp)
    live = table.epoch[slots] == plan.epochs
    settled = settle(table, plan, result, slots, live)
    num_new = np.zeros(plan.num_rows, np.int32)
    first = np.zeros(plan.num_rows, np.int32)
    num_new[settled.rows] = settled.kept
    first[settled.rows] = settled.first - table.num_prompt[settled.slots]
    ends = _live_ends(state, plan, result, settled)
    _register(state, plan, result, settled)
    for row in np.flatnonzero(~live).tolist():
        request = plan.requests[row]
        if not request.is_finished:
            first[row] = request.num_output_tokens
            num_new[row] = _settle_stale(plan, result, row, ends)
    emits = num_new > 0
    emits[list(ends)] = True
    if emits.all():
        rows = np.arange(plan.num_rows, dtype=np.int32)
        return UpdateBatch(rows, plan.requests, result.token_ids, num_new, first, ends)
    rows = np.flatnonzero(emits).astype(np.int32)
    requests = [plan.requests[row] for row in rows.tolist()]
    return UpdateBatch(rows, requests, result.token_ids[rows], num_new[rows], first[rows], ends)


def _live_ends(state: SchedulerState, plan: StepPlan, result: StepResult, settled: Settled) -> Ends:
    """Ends of rows that still hold their slot; grammars see the tokens that are kept."""
    ends: Ends = {}
    bad = result.bad_rows
    for k in np.flatnonzero(settled.stopped).tolist():
        row = int(settled.rows[k])
        if bad is not None and bad[row]:
            ends[row] = ERROR
        else:
            last = result.token_ids[row, settled.kept[k] - 1] if settled.kept[k] else -1
            ends[row] = finish_of(plan.requests[row], int(last))
    watched = state.table.has_grammar[settled.slots]
    for k in np.flatnonzero(watched).tolist() if watched.any() else ():
        row = int(settled.rows[k])
        kept = result.token_ids[row, : settled.kept[k]].tolist()
        if not _accepts(plan.requests[row], kept):
            ends[row] = ERROR
        state.table.has_grammar[settled.slots[k]] = plan.requests[row].grammar is not None
    return ends


def _register(state: SchedulerState, plan: StepPlan, result: StepResult, settled: Settled) -> None:
    """Full blocks of processed tokens may be found from now on: no placeholder among them, and
    no draft that a stop cut off."""
    table, s = state.table, settled.slots
    if not state.config.enable_prefix_caching:
        return
    certain = np.minimum(table.num_computed[s] - table.placeholders[s], table.num_tokens[s])
    full = certain // state.config.block_size > table.num_registered[s]
    if result.bad_rows is not None:
        full &= ~result.bad_rows[settled.rows]
    for k in np.flatnonzero(full).tolist():
        state.kv.register(plan.requests[settled.rows[k]], int(certain[k]))


def _settle_stale(plan: StepPlan, result: StepResult, row: int, ends: Ends) -> int:
    """Late output of a request preempted since: delivered once or dropped; no counter moves
    except that it is in flight no longer. Returns the tokens kept."""
    request = plan.requests[row]
    dropped = request.drop_stale
    request.num_stale_output_tokens -= int(plan.num_new[row])
    if request.num_stale_output_tokens == 0:
        request.drop_stale = False
    if dropped or not plan.samples[row]:
        return 0
    if result.bad_rows is not None and result.bad_rows[row]:
        ends[row] = ERROR
        return 0
    tokens = result.token_ids[row, : result.num_sampled[row]].tolist()
    kept, end = cut_at_stop(request, tokens)
    request.append(kept)
    if not _accepts(request, kept):
        end = ERROR
    if end is not None:
        ends[row] = end
    return len(kept)


def _accepts(request: Request, token_ids: list[int]) -> bool:
    grammar = request.grammar
    if grammar is None or not token_ids:
        return True
    accepted = grammar.accept(token_ids)
    if grammar.over:
        request.grammar = None
    return accepted
