"""A `StepPlan` packed into int32 blobs of fixed shape: one for the forward program, and a small
one for the sampler.

The layout is a function of the bucket alone, so that the device side can slice the blobs
statically. Packing is NumPy over rows and tokens; there is no Python loop over tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxengine.sched.plan import Int32, StepPlan

QUERY_BLOCK = 128  # prompt tokens of one prefill work item

# Columns of a row's sampling record; floats travel as their bits.
SAMPLING_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
SAMPLING_INTS = (
    "top_k",
    "seed_lo",
    "seed_hi",
    "num_prompt",
    "num_logprobs",
    "num_prompt_logprobs",
    "min_tokens",
    "flags",
)
GREEDY_BELOW = 1e-5  # temperatures under this mean argmax
SAMPLING_COLUMNS = SAMPLING_FLOATS + SAMPLING_INTS
COLUMN = {name: i for i, name in enumerate(SAMPLING_COLUMNS)}

# Bits of `flags`.
HAS_EDITS = 1  # logit_bias, bans, minimum length: the slot's edit list is read
HAS_ALLOW = 2  # allowed_token_ids: the slot's mask is read
HAS_BAD_WORDS = 4  # words of several tokens
HAS_PENALTIES = 8


@dataclass(frozen=True)
class Bucket:
    """A compiled shape: T tokens, S rows; decode-only programs have T == S and no work items.
    `dbo`: the program runs it as two microbatches out of phase. With `drafts` every row has
    1 + drafts tokens, and T == S * (1 + drafts); see `jaxengine.sched.verify_batch`."""

    tokens: int
    rows: int
    decode_only: bool
    dbo: bool = False
    drafts: int = 0


@dataclass(frozen=True)
class BatchShape:
    """What every bucket shares: KV groups, table width W, block size P, pool size N."""

    num_groups: int
    table_width: int
    block_size: int
    num_blocks: int


HEADER = ("num_tokens", "num_rows", "num_decode", "num_items")


# Words between starts of sections. A section may be handed to a kernel where it lies, without a
# copy, and Mosaic refuses a buffer that does not begin at a multiple of 256 bytes.
ALIGNMENT = 64
_BY_GROUP = ("kv_slot", "block_table")  # a layer is handed one group's part


@dataclass(frozen=True)
class Section:
    """A part of a blob. `dims` is its shape; its first axis, of sections by KV group, steps over
    `stride` words, so that every group's part is aligned too. Otherwise there is one such part."""

    offset: int
    dims: tuple[int, ...]
    num_parts: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """Sections of the blob by name."""

    sections: dict[str, Section]
    size: int


@functools.cache
def layout_of(bucket: Bucket, shape: BatchShape) -> Layout:
    """The blob's sections for a bucket."""
    tokens, rows = bucket.tokens, bucket.rows
    sizes: list[tuple[str, tuple[int, ...]]] = [
        ("header", (len(HEADER),)),
        ("token_ids", (tokens,)),
        ("positions", (tokens,)),
        ("kv_slot", (shape.num_groups, tokens)),
        ("slots", (rows,)),
        ("seq_len", (rows,)),
        ("logits_index", (rows,)),
        ("q_start", (rows + 1,)),
        ("block_table", (shape.num_groups, rows, shape.table_width)),
    ]
    if not bucket.decode_only:
        sizes.append(("items", (max_items(bucket), 4)))
    return section_layout(sizes)


@functools.cache
def rows_layout(rows: int) -> Layout:
    """Sections of the sampler's blob for `rows` rows."""
    return section_layout(
        [
            ("use_grammar", (1,)),
            ("slots", (rows,)),
            ("seq_len", (rows,)),
            ("samples", (rows,)),
            ("min_active", (rows,)),
            ("sampling", (rows, len(SAMPLING_COLUMNS))),
        ]
    )


def section_layout(sizes: list[tuple[str, tuple[int, ...]]]) -> Layout:
    """Sections of a blob, one behind the other, each aligned."""
    sections, offset = {}, 0
    for name, dims in sizes:
        parts = dims[0] if name in _BY_GROUP else 1
        stride = -(-(int(np.prod(dims)) // parts) // ALIGNMENT) * ALIGNMENT
        sections[name] = Section(offset, dims, parts, stride)
        offset += parts * stride
    return Layout(sections, offset)


def max_items(bucket: Bucket) -> int:
    """Most prefill work items: every row may end in a partial one."""
    return bucket.tokens // QUERY_BLOCK + bucket.rows


def view(blob: Int32, layout: Layout, name: str) -> Int32:
    """A section of the blob as an array that writes through."""
    one = layout.sections[name]
    parts = blob[one.offset : one.offset + one.num_parts * one.stride].reshape(one.num_parts, -1)
    return parts[:, : int(np.prod(one.dims)) // one.num_parts].reshape(one.dims)


def pack(
    plan: StepPlan,
    bucket: Bucket,
    shape: BatchShape,
    block_tables: Sequence[Int32],
    num_slots: int,
) -> Int32:
    """Pack a plan for the forward program; `block_tables` are the per-slot tables.

    Padding rows and tokens carry positive out-of-range indices (dropped on the device), all
    distinct where the device promises uniqueness.
    """
    layout = layout_of(bucket, shape)
    blob = np.zeros(layout.size, np.int32)
    rows, tokens, num_decode = plan.num_rows, plan.num_tokens, plan.num_decode
    row_of = np.repeat(np.arange(rows), plan.num_new)
    first = first_tokens(plan)
    positions = plan.start[row_of] + np.arange(tokens) - first[row_of]

    view(blob, layout, "positions")[:tokens] = positions
    ids = view(blob, layout, "token_ids")
    for row in range(num_decode, rows):
        begin, count = int(plan.start[row]), int(plan.num_new[row])
        known = plan.requests[row].token_ids[begin : begin + count]
        ids[first[row] : first[row] + count] = known

    kv_slot = view(blob, layout, "kv_slot")
    tables = view(blob, layout, "block_table")
    seq_len = plan.start + plan.num_new
    used = -(-int(seq_len.max()) // shape.block_size)
    slot_of = plan.slots[row_of]
    for group, table in enumerate(block_tables):
        block = table[slot_of, positions // shape.block_size]
        kv_slot[group, :tokens] = block * shape.block_size + positions % shape.block_size
        pad = shape.num_blocks * shape.block_size
        kv_slot[group, tokens:] = pad + np.arange(bucket.tokens - tokens)
        entries = table[plan.slots, :used]
        # Entries that stand for no block are masked by length or window; read block 0 instead.
        tables[group, :rows, :used] = np.where(entries < shape.num_blocks, entries, 0)

    slots = view(blob, layout, "slots")
    slots[:rows] = plan.slots
    slots[rows:] = num_slots + np.arange(bucket.rows - rows)
    view(blob, layout, "seq_len")[:rows] = seq_len
    view(blob, layout, "logits_index")[:rows] = first + plan.num_new - 1
    starts = view(blob, layout, "q_start")
    starts[:rows] = first
    starts[rows:] = tokens
    num_items = 0
    if not bucket.decode_only:
        items = _work_items(plan, first)
        num_items = len(items)
        view(blob, layout, "items")[:num_items] = items
    view(blob, layout, "header")[:] = tokens, rows, num_decode, num_items
    return blob


def pack_rows(plan: StepPlan, num_rows: int, sampling: NDArray[np.int32], num_slots: int) -> Int32:
    """Pack a plan's rows for a sampler of `num_rows`; `sampling` is the per-slot table."""
    layout = rows_layout(num_rows)
    blob = np.zeros(layout.size, np.int32)
    rows = plan.num_rows
    view(blob, layout, "use_grammar")[:] = plan.has_grammar
    slots = view(blob, layout, "slots")
    slots[:rows] = plan.slots
    slots[rows:] = num_slots + np.arange(num_rows - rows)
    view(blob, layout, "seq_len")[:rows] = plan.start + plan.num_new
    view(blob, layout, "samples")[:rows] = plan.samples
    record = view(blob, layout, "sampling")
    record[:rows] = sampling[plan.slots]
    view(blob, layout, "min_active")[:rows] = plan.num_output < record[:rows, COLUMN["min_tokens"]]
    return blob


def takes_the_best(rows_blob: Int32, num_rows: int) -> bool:
    """Every row that samples is greedy, and nothing but a grammar changes its logits. The blob is
    that of samplers of `num_rows`, of any number of shards."""
    layout = rows_layout(num_rows)
    for blob in rows_blob.reshape(-1, layout.size):
        record = view(blob, layout, "sampling")[view(blob, layout, "samples") > 0]
        temperature = record[:, COLUMN["temperature"]].view(np.float32)
        if record[:, COLUMN["flags"]].any() or (temperature >= GREEDY_BELOW).any():
            return False
    return True


def pack_empty(bucket: Bucket, shape: BatchShape, num_slots: int) -> Int32:
    """The blob of a step without tokens: everything is padding."""
    layout = layout_of(bucket, shape)
    blob = np.zeros(layout.size, np.int32)
    pad = shape.num_blocks * shape.block_size
    view(blob, layout, "kv_slot")[:] = pad + np.arange(bucket.tokens)
    view(blob, layout, "slots")[:] = num_slots + np.arange(bucket.rows)
    return blob


def pack_no_rows(num_rows: int, num_slots: int) -> Int32:
    """The sampler's blob of a step without rows."""
    layout = rows_layout(num_rows)
    blob = np.zeros(layout.size, np.int32)
    view(blob, layout, "slots")[:] = num_slots + np.arange(num_rows)
    return blob


def first_tokens(plan: StepPlan) -> NDArray[np.int64]:
    """[S] index in the batch of every row's first token."""
    return np.cumsum(plan.num_new) - plan.num_new


def _work_items(plan: StepPlan, first: NDArray[np.int64]) -> NDArray[np.int64]:
    """(row, first token, position, count) of every prefill block, [items, 4]."""
    prefill = np.arange(plan.num_decode, plan.num_rows)
    counts = -(-plan.num_new[prefill] // QUERY_BLOCK)
    row = np.repeat(prefill, counts)
    part = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = part * QUERY_BLOCK
    left = np.minimum(plan.num_new[row] - offset, QUERY_BLOCK)
    return np.stack([row, first[row] + offset, plan.start[row] + offset, left], axis=1)


def pack_targets(plan: StepPlan, tokens: int, rows: Sequence[tuple[int, int, int]]) -> Int32:
    """[tokens] the next prompt token after every token of these (row, first token, count)."""
    targets = np.zeros(tokens, np.int32)
    for row, first, count in rows:
        begin = int(plan.start[row]) + 1
        targets[first : first + count] = plan.requests[row].token_ids[begin : begin + count]
    return targets


def prompt_targets(plan: StepPlan, row: int) -> int:
    """How many tokens of the row are followed by a prompt token."""
    begin = int(plan.start[row]) + 1
    return max(0, min(int(plan.num_new[row]), plan.requests[row].num_prompt_tokens - begin))
