"""The arithmetic of a step, for all rows at once.

There is no prefill phase and no decode phase: every request's `num_computed` chases what it
knows (`num_tokens`) plus what it was promised (`placeholders`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxengine.sched.plan import Int32, StepPlan, StepResult
from jaxengine.sched.slots import Bool, Index, SlotTable


def wanted(table: SlotTable, slots: Index) -> Int32:
    """[R] tokens each row could feed now, its drafts included.

    0 for a row whose steps in flight bring it to its end even if they reject every draft: another
    step could only be thrown away. (With an unknown EOS one may be, that is expected.)
    """
    known = table.num_tokens[slots]
    pending = table.pending[slots]
    stop = table.stop_length[slots]
    computed = table.num_computed[slots]
    ahead = known + table.placeholders[slots]
    n: Int32 = np.minimum(ahead, stop) - computed
    n[(pending > 0) & (known + pending >= stop)] = 0
    drafts = table.num_drafts[slots]
    if drafts.any():
        # Only behind a decode token, and only as far as their tokens could be kept.
        useful = np.clip(stop - 1 - ahead, 0, drafts)
        n += np.where((n == 1) & table.sampled[slots], useful, 0)
    return n


def fit_budget(n: Int32, budget: int) -> Int32:
    """Give the budget out in row order; the row at the edge gets what is left."""
    if int(n.sum()) <= budget:
        return n
    before = np.cumsum(n) - n
    fitted: Int32 = np.minimum(n, np.maximum(budget - before, 0)).astype(np.int32)
    return fitted


class Booking(NamedTuple):
    """What `book` wrote down about each row, as it was before the step."""

    start: Int32  # [S]
    num_output: Int32  # [S]
    samples: Bool  # [S]
    pending: Int32  # [S] sampling steps already in flight
    uncertain: Bool  # [S] drafts are in flight: `start` is the most it can be


def book(table: SlotTable, slots: Index, n: Int32, drafts: Int32) -> Booking:
    """Advance the counters of the rows of a step, before its result is known."""
    start = table.num_computed[slots]
    ahead = table.num_tokens[slots] + table.placeholders[slots]
    computed = start + n
    table.num_computed[slots] = computed
    table.in_flight[slots] += n
    pending = table.pending[slots]
    uncertain: Bool = table.placeholders[slots] > pending
    samples = computed >= ahead  # else a chunk that ends before the known tokens do
    table.placeholders[slots] += samples * (1 + drafts)
    table.pending[slots] = pending + samples
    table.sampled[slots] |= samples
    table.num_drafts[slots] = 0
    return Booking(start, ahead - table.num_prompt[slots], samples, pending, uncertain)


class Settled(NamedTuple):
    """What the live sampling rows of a step brought. K rows."""

    rows: Index  # [K] row of the plan
    slots: Index  # [K]
    first: Int32  # [K] num_tokens before
    kept: Int32  # [K] tokens appended
    stopped: Bool  # [K] the request ends


def settle(
    table: SlotTable, plan: StepPlan, result: StepResult, slots: Index, live: Bool
) -> Settled:
    """Replace the promises of the live rows by what came: counters, tokens, stops.

    A row knows 5 tokens, of which the newest is not fed yet. Its step feeds that one and 2 drafts;
    the device keeps one draft and samples a token behind it, `ids` [8, 9, -1], `count` 2:

                      num_tokens  num_computed  placeholders  pending  in_flight
        before                 5             4             0        0          0
        after `book`           5             7             3        1          3
        after `settle`         7             6             0        0          0

    The refused draft's place is computed again: 7 known, 6 computed, one to feed.
    """
    table.in_flight[slots[live]] -= plan.num_new[live]
    rows = np.flatnonzero(live & plan.samples)
    s = slots[rows]
    ids, count = result.token_ids[rows], result.num_sampled[rows]
    booked = 1 + plan.num_drafts[rows]
    table.pending[s] -= 1
    table.placeholders[s] -= booked
    table.num_computed[s] -= booked - count  # rejected drafts were never fed
    first = table.num_tokens[s]
    kept, stopped = keep_until_stop(table, s, first, ids, count)
    if result.bad_rows is not None:
        bad = result.bad_rows[rows]
        kept[bad] = 0
        stopped |= bad
    for j in range(ids.shape[1]):
        take = kept > j
        table.tokens[s[take], first[take] + j] = ids[take, j]
    table.num_tokens[s] = first + kept
    return Settled(rows, s, first, kept, stopped)


def keep_until_stop(
    table: SlotTable, slots: Index, first: Int32, ids: Int32, count: NDArray[np.int32]
) -> tuple[Int32, Bool]:
    """How many of each row's tokens are kept, and whether the request ends with them.

    The token that stops a request is kept, what follows it is not. A request that may have no
    output token at all keeps none and ends.
    """
    room = table.stop_length[slots] - first
    kept: Int32 = np.zeros(len(slots), np.int32)
    stopped: Bool = room <= 0
    stop_ids = table.stop_ids[slots]
    for j in range(ids.shape[1]):
        keep = ~stopped & (count > j)
        kept += keep
        hit = (ids[:, j, None] == stop_ids).any(1)
        stopped |= keep & (hit | (kept >= room))
    return kept, stopped
