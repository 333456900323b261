"""A plan whose rows have drafts, packed for the program that verifies them.

Only rows are packed: how many tokens a row has may be known to the device alone, which then works
out positions and cache slots itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from jaxengine.sched.batch import BatchShape, Bucket, Layout, section_layout, view
from jaxengine.sched.plan import Int32, StepPlan

ON_DEVICE = -1  # a draft that the device proposes; also a position of a row it must look up


def verify_bucket(rows: int, drafts: int) -> Bucket:
    """The shape of so many rows with up to so many drafts each."""
    return Bucket(rows * (1 + drafts), rows, True, drafts=drafts)


@functools.cache
def verify_layout(bucket: Bucket, shape: BatchShape) -> Layout:
    """The blob's sections. `start` is the position of the row's last token, or ON_DEVICE."""
    rows = bucket.rows
    return section_layout(
        [
            ("num_rows", (1,)),
            ("slots", (rows,)),
            ("start", (rows,)),
            ("num_drafts", (rows,)),
            ("drafts", (rows, bucket.drafts)),
            ("block_table", (shape.num_groups, rows, shape.table_width)),
        ]
    )


def pack_verify(
    plan: StepPlan,
    bucket: Bucket,
    shape: BatchShape,
    block_tables: Sequence[Int32],
    num_slots: int,
) -> Int32:
    """Pack a plan of decode rows; drafts are the requests' `spec_token_ids`."""
    layout, rows = verify_layout(bucket, shape), plan.num_rows
    assert plan.num_decode == rows <= bucket.rows
    blob = np.zeros(layout.size, np.int32)
    view(blob, layout, "num_rows")[:] = rows
    slots = view(blob, layout, "slots")
    slots[:rows] = plan.slots
    slots[rows:] = num_slots + np.arange(bucket.rows - rows)
    view(blob, layout, "start")[:rows] = np.where(plan.uncertain, ON_DEVICE, plan.start)
    view(blob, layout, "num_drafts")[:rows] = plan.num_drafts
    drafts = view(blob, layout, "drafts")
    for row in np.flatnonzero(plan.num_drafts).tolist():
        count = int(plan.num_drafts[row])
        drafts[row, :count] = plan.requests[row].spec_token_ids[:count]
    used = -(-int((plan.start + plan.num_new).max()) // shape.block_size)
    tables = view(blob, layout, "block_table")
    for group, table in enumerate(block_tables):
        entries = table[plan.slots, :used]
        # Entries that stand for no block are masked by length or window; read block 0 instead.
        tables[group, :rows, :used] = np.where(entries < shape.num_blocks, entries, 0)
    return blob
