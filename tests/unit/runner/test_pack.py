"""NumPy packs a plan, the device unpacks the same; what a slot record holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.runner.forward import sections
from jaxengine.runner.state import SlotState, seed_slot
from jaxengine.sampling import inputs
from jaxengine.sched import batch, slot_record
from jaxengine.sched.batch import (
    COLUMN,
    HAS_ALLOW,
    HAS_BAD_WORDS,
    HAS_EDITS,
    HAS_PENALTIES,
    HEADER,
    QUERY_BLOCK,
    SAMPLING_COLUMNS,
    BatchShape,
    Bucket,
    layout_of,
    max_items,
    pack,
    pack_rows,
    pack_targets,
    prompt_targets,
    rows_layout,
    takes_the_best,
    view,
)
from jaxengine.sched.buckets import all_buckets
from jaxengine.sched.plan import StepPlan
from jaxengine.sched.slot_record import SlotShape, pack_slot
from jaxengine.sched.verify_batch import verify_bucket, verify_layout

NUM_SLOTS = 9
SHAPE = BatchShape(num_groups=2, table_width=120, block_size=4, num_blocks=1100)


def make_plan(rng: np.random.Generator, num_decode: int, prefill: list[int]) -> StepPlan:
    """Rows of random slots; a prefill row of n tokens begins somewhere in its prompt."""
    rows = num_decode + len(prefill)
    num_new = np.array([1] * num_decode + prefill, np.int32)
    start = rng.integers(0, 60, rows).astype(np.int32)
    requests: list[Any] = [
        SimpleNamespace(
            token_ids=rng.integers(1, 1000, 600).astype(np.int32),
            num_prompt_tokens=int(start[row] + num_new[row] + rng.integers(-1, 3)),
        )
        for row in range(rows)
    ]
    return StepPlan(
        step_id=1,
        requests=requests,
        slots=rng.permutation(NUM_SLOTS)[:rows].astype(np.int32),
        start=start,
        num_new=num_new,
        samples=rng.random(rows) < 0.5,
        num_decode=num_decode,
        num_output=rng.integers(0, 5, rows).astype(np.int32),
    )


def make_tables(rng: np.random.Generator) -> list[np.ndarray]:
    """Every slot has blocks of its own; some entries stand for no block."""
    tables = []
    for _ in range(SHAPE.num_groups):
        table = np.full((NUM_SLOTS, SHAPE.table_width), SHAPE.num_blocks, np.int32)
        blocks = rng.permutation(SHAPE.num_blocks)[: NUM_SLOTS * 118].reshape(NUM_SLOTS, 118)
        table[:, :118] = blocks
        tables.append(table)
    tables[1][:, :3] = SHAPE.num_blocks  # behind a window
    return tables


BUCKETS = [
    Bucket(1, 1, True),
    Bucket(4, 4, True),
    Bucket(9, 9, True),
    Bucket(17, 5, False),
    Bucket(64, 9, False),
    Bucket(400, 9, False),
]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), full=st.booleans())
def test_what_is_packed_is_unpacked(bucket: Bucket, seed: int, full: bool) -> None:
    rng = np.random.default_rng(seed)
    if bucket.decode_only:
        plan = make_plan(rng, bucket.rows if full else int(rng.integers(1, bucket.rows + 1)), [])
    else:
        num_decode = int(rng.integers(0, bucket.rows))
        left = bucket.tokens - num_decode
        count = int(rng.integers(1, bucket.rows - num_decode + 1))
        each = int(rng.integers(1, left // count + 1))
        sizes = [each] * (count - 1)
        plan = make_plan(rng, num_decode, [*sizes, left - sum(sizes) if full else each])
    plan.start[:] = np.maximum(plan.start, 12)  # past the entries without a block
    tables = make_tables(rng)
    blob = pack(plan, bucket, SHAPE, tables, NUM_SLOTS)
    layout = layout_of(bucket, SHAPE)
    assert blob.shape == (layout.size,) and blob.dtype == np.int32
    got = {name: np.asarray(x) for name, x in sections(layout, blob).items()}
    header = dict(zip(HEADER, got["header"].tolist(), strict=True))
    assert header["num_tokens"] == plan.num_tokens and header["num_rows"] == plan.num_rows
    assert header["num_decode"] == plan.num_decode
    check_tokens(plan, tables, got)
    check_rows(plan, tables, got)
    if not bucket.decode_only:
        check_items(plan, bucket, got["items"], header["num_items"])


def check_tokens(plan: StepPlan, tables: list[np.ndarray], got: dict[str, np.ndarray]) -> None:
    """Token by token, in plain Python."""
    token = 0
    for row in range(plan.num_rows):
        for i in range(plan.num_new[row]):
            position = int(plan.start[row]) + i
            assert got["positions"][token] == position
            if row >= plan.num_decode:
                assert got["token_ids"][token] == plan.requests[row].token_ids[position]
            for group, table in enumerate(tables):
                block = table[plan.slots[row], position // SHAPE.block_size]
                assert got["kv_slot"][group, token] == block * 4 + position % 4
            token += 1
        assert got["logits_index"][row] == token - 1
    pool = SHAPE.num_blocks * SHAPE.block_size
    for group in range(len(tables)):
        pads = got["kv_slot"][group, token:]
        assert (pads >= pool).all() and len(set(pads.tolist())) == len(pads)
        assert (got["kv_slot"][group, :token] < pool).all()


def check_rows(plan: StepPlan, tables: list[np.ndarray], got: dict[str, np.ndarray]) -> None:
    rows = plan.num_rows
    assert (got["slots"][:rows] == plan.slots).all()
    pads = got["slots"][rows:]
    assert (pads >= NUM_SLOTS).all() and len(set(pads.tolist())) == len(pads)
    assert (got["seq_len"][:rows] == plan.start + plan.num_new).all()
    assert (got["block_table"] >= 0).all() and (got["block_table"] < SHAPE.num_blocks).all()
    for group, table in enumerate(tables):
        for row in range(rows):
            used = -(-int(plan.start[row] + plan.num_new[row]) // SHAPE.block_size)
            want = table[plan.slots[row], :used]
            held = want < SHAPE.num_blocks
            assert (got["block_table"][group, row, :used][held] == want[held]).all()


def check_items(plan: StepPlan, bucket: Bucket, items: np.ndarray, count: int) -> None:
    assert count <= max_items(bucket) == len(items)
    first = np.cumsum(plan.num_new) - plan.num_new
    want = []
    for row in range(plan.num_decode, plan.num_rows):
        for offset in range(0, int(plan.num_new[row]), QUERY_BLOCK):
            size = min(QUERY_BLOCK, int(plan.num_new[row]) - offset)
            want.append([row, first[row] + offset, plan.start[row] + offset, size])
    assert items[:count].tolist() == want
    assert (np.diff(items[:count, 1]) > 0).all()


def test_rows_for_the_sampler() -> None:
    rng = np.random.default_rng(3)
    plan = make_plan(rng, 3, [5])
    table = rng.integers(0, 2**31, (NUM_SLOTS, len(SAMPLING_COLUMNS))).astype(np.int32)
    table[:, COLUMN["min_tokens"]] = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    plan.num_output[:] = 3
    blob = pack_rows(plan, 8, table, NUM_SLOTS)
    got = {name: np.asarray(x) for name, x in sections(rows_layout(8), blob).items()}
    assert (got["sampling"][:4] == table[plan.slots]).all()
    assert (got["samples"] == [*plan.samples.astype(int), 0, 0, 0, 0]).all()
    assert (got["min_active"][:4] == (plan.slots > 3)).all()
    assert (got["seq_len"][:4] == plan.start + plan.num_new).all()
    assert (got["slots"][:4] == plan.slots).all() and (got["slots"][4:] >= NUM_SLOTS).all()


def test_targets_are_the_next_prompt_tokens() -> None:
    plan = make_plan(np.random.default_rng(4), 1, [6, 9])
    plan.requests[1].num_prompt_tokens = int(plan.start[1]) + 4  # the prompt ends in the chunk
    plan.requests[2].num_prompt_tokens = int(plan.start[2]) + 90
    counts = [prompt_targets(plan, row) for row in (1, 2)]
    assert counts == [3, 9]
    targets = pack_targets(plan, 32, [(1, 1, 3), (2, 7, 9)])
    for row, first, count in ((1, 1, 3), (2, 7, 9)):
        begin = int(plan.start[row]) + 1
        want = plan.requests[row].token_ids[begin : begin + count]
        assert (targets[first : first + count] == want).all()
    assert targets[16:].tolist() == [0] * 16


def test_a_slot_record_arrives_whole_and_alone() -> None:
    shape = SlotShape(num_slots=5, max_model_len=40, vocab_size=100)
    rng = np.random.default_rng(5)
    before = {
        name: rng.integers(0, 99, (5, *dims)).astype(np.int32)
        for name, dims in shape.fields().items()
    }
    slots = SlotState(last_token=np.arange(5, dtype=np.int32), **before)
    blob = pack_slot(
        shape,
        3,
        np.arange(7, dtype=np.int32),
        edits=[(8, slot_record.EDIT_ADD, -1.5), (9, slot_record.EDIT_BAN, 0.0)],
        bad_words=[[1, 2], [3, 4, 5]],
        allowed=[0, 31, 32, 99],
    )
    assert blob.shape == (shape.blob_size,)
    after = jax.jit(lambda s, b: seed_slot(shape, s, b))(slots, blob)
    for name in before:
        others = [0, 1, 2, 4]
        assert (np.asarray(getattr(after, name))[others] == before[name][others]).all()
    assert np.asarray(after.last_token).tolist() == [0, 1, 2, 3, 4]
    assert after.history[3, :7].tolist() == list(range(7))
    assert after.edit_token[3, :3].tolist() == [8, 9, 0]
    kinds = [slot_record.EDIT_ADD, slot_record.EDIT_BAN, slot_record.EDIT_NONE]
    assert after.edit_kind[3, :3].tolist() == kinds
    assert np.asarray(after.edit_value[3, :1]).view(np.float32).tolist() == [-1.5]
    assert after.bad_prefix[3, 0].tolist()[:3] == [1, -1, -1]
    assert after.bad_prefix[3, 1].tolist()[:3] == [3, 4, -1]
    assert after.bad_last[3].tolist()[:3] == [2, 5, -1]
    bits = np.unpackbits(np.asarray(after.allow_mask[3]).view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [0, 31, 32, 99]


def test_scheduler_and_sampler_number_the_edits_alike() -> None:
    names = [name for name in vars(slot_record) if name.startswith("EDIT_")]
    assert set(names) == {"EDIT_NONE", "EDIT_ADD", "EDIT_BAN", "EDIT_MIN_TOKENS"}
    for name in names:
        assert getattr(slot_record, name) == getattr(inputs, name)


def test_which_steps_take_the_best_token() -> None:
    assert batch.GREEDY_BELOW == inputs.GREEDY_BELOW
    layout = rows_layout(3)
    blob = np.zeros((2, layout.size), np.int32)  # two shards
    samples = view(blob[1], layout, "samples")
    record = view(blob[1], layout, "sampling")
    record[:, COLUMN["temperature"]] = np.array([0.0, 0.7, 9e-6], np.float32).view(np.int32)
    record[2, COLUMN["num_logprobs"]] = 3
    samples[:] = [1, 0, 1]  # who draws does not sample in this step
    assert takes_the_best(blob.reshape(-1), 3)
    samples[1] = 1
    assert not takes_the_best(blob.reshape(-1), 3)
    samples[1] = 0
    for flag in (HAS_EDITS, HAS_ALLOW, HAS_BAD_WORDS, HAS_PENALTIES):
        record[2, COLUMN["flags"]] = flag
        assert not takes_the_best(blob.reshape(-1), 3)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 48, 512])
def test_what_a_kernel_may_be_handed_begins_at_256_bytes(groups: int, width: int) -> None:
    """A section, and of sections by group each group's part, is handed over where it lies."""
    shape = BatchShape(groups, width, 16, 100)
    buckets = all_buckets(64, 1024)
    layouts = [layout_of(bucket, shape) for bucket in buckets]
    layouts += [verify_layout(verify_bucket(rows, 3), shape) for rows in (1, 5, 64)]
    layouts += [rows_layout(rows) for rows in (1, 7, 64)]
    for layout in layouts:
        end = 0
        for name, one in layout.sections.items():
            assert one.offset >= end
            starts = [one.offset + i * one.stride for i in range(one.num_parts)]
            assert not any(4 * start % 256 for start in starts), name
            end = one.offset + one.num_parts * one.stride
            assert one.num_parts * one.stride >= np.prod(one.dims)
        assert layout.size >= end
        blob = np.zeros(layout.size, np.int32)
        for number, name in enumerate(layout.sections, 1):
            section = view(blob, layout, name)
            assert not section.any()  # none reaches into another
            section[:] = number
            assert (np.asarray(sections(layout, blob)[name]) == number).all()
