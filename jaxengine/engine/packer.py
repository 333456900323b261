"""Packs a plan into a batch: sampling records and slot records by slot, then one blob. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxengine.engine.pooling import NO_ROW, pool_index
from jaxengine.sched.batch import (
    COLUMN,
    HAS_ALLOW,
    HAS_BAD_WORDS,
    HAS_EDITS,
    HAS_PENALTIES,
    SAMPLING_COLUMNS,
    BatchShape,
    Bucket,
    first_tokens,
    pack,
    pack_empty,
    pack_no_rows,
    pack_rows,
    pack_targets,
    prompt_targets,
)
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import Int32, StepPlan
from jaxengine.sched.request import Request
from jaxengine.sched.slot_record import (
    EDIT_ADD,
    EDIT_BAN,
    EDIT_MIN_TOKENS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_EDITS,
    SlotShape,
    pack_slot,
)
from jaxengine.sched.verify_batch import pack_verify
from jaxengine.wire.messages import EngineRequest


@dataclass(frozen=True)
class Prepared:
    """What a slot needs to know of a request, worked out once, when the request arrives."""

    wire: EngineRequest
    record: Int32  # its row of the sampling table
    edits: list[tuple[int, int, float]]
    bad_words: list[list[int]]  # of several tokens

    @property
    def needs_slot_record(self) -> bool:
        return bool(self.record[COLUMN["flags"]])


class Packer:
    """Keeps the per-slot sampling records; a request's record is written when it gets a slot."""

    def __init__(
        self, shape: BatchShape, slots: SlotShape, seed: int, *, always_seed: bool = False
    ) -> None:
        """`always_seed`: the device needs every request's tokens (to look drafts up)."""
        self._always_seed = always_seed
        self._shape = shape
        self._slots = slots
        self._records = np.zeros((slots.num_slots, len(SAMPLING_COLUMNS)), np.int32)
        self._seeds = np.random.default_rng(seed)

    def prepare(self, wire: EngineRequest) -> Prepared:
        """Work out a request's records. Raises ValueError when its logit edits are too many."""
        edits, words = _edits(wire)
        seed = wire.params.seed
        if seed is None:
            seed = int(self._seeds.integers(0, 2**64, dtype=np.uint64))
        return Prepared(wire, _record(wire, seed, edits, words), edits, words)

    def seeds(self, plan: StepPlan) -> list[Int32]:
        """Take note of requests that got a slot; the slot records that the device must write."""
        seeds = []
        for request in plan.new_requests:
            prepared: Prepared = request.params
            self._records[request.slot] = prepared.record
            if prepared.needs_slot_record or self._always_seed:
                seeds.append(self._slot_record(request))
        return seeds

    def pack(
        self,
        plan: StepPlan,
        block_tables: Sequence[Int32],
        bucket: Bucket,
        rows: int,
        shard: int = 0,
        seeds: list[Int32] | None = None,
    ) -> Batch:
        """One shard's batch for these shapes: forward bucket and sampler rows."""
        num_slots = self._slots.num_slots
        wants = self._records[plan.slots, COLUMN["num_logprobs"]] >= 0
        prompt_rows = self._prompt_rows(plan)
        return Batch(
            bucket=bucket,
            blob=pack(plan, bucket, self._shape, block_tables, num_slots),
            sampler_rows=rows,
            rows_blob=pack_rows(plan, rows, self._records, num_slots),
            num_rows=(plan.num_rows,),
            seeds=seeds or [],
            want_logprobs=bool(wants.any()),
            masked=plan.has_grammar,
            prompt_rows=[(shard, *where) for where in prompt_rows],
            prompt_targets=pack_targets(plan, bucket.tokens, prompt_rows) if prompt_rows else None,
            pool_index=pool_index(plan, bucket.tokens),
        )

    def pack_verify(self, plan: StepPlan, block_tables: Sequence[Int32], bucket: Bucket) -> Batch:
        """The batch of a plan of decode rows with drafts; one shard."""
        num_slots, rows = self._slots.num_slots, bucket.rows
        seeds = self.seeds(plan)
        wants = self._records[plan.slots, COLUMN["num_logprobs"]] >= 0
        return Batch(
            bucket=bucket,
            blob=pack_verify(plan, bucket, self._shape, block_tables, num_slots),
            sampler_rows=rows,
            rows_blob=pack_rows(plan, rows, self._records, num_slots),
            num_rows=(plan.num_rows,),
            seeds=seeds,
            want_logprobs=bool(wants.any()),
            masked=plan.has_grammar,
        )

    def empty(self, bucket: Bucket, rows: int) -> Batch:
        """A shard without anything to run in a step that others run."""
        num_slots = self._slots.num_slots
        blob = pack_empty(bucket, self._shape, num_slots)
        return Batch(bucket, blob, rows, pack_no_rows(rows, num_slots), (0,))

    def _prompt_rows(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        wants = self._records[plan.slots, COLUMN["num_prompt_logprobs"]] >= 0
        if not wants[plan.num_decode :].any():
            return []
        first = first_tokens(plan)
        counts = [prompt_targets(plan, row) if wants[row] else 0 for row in range(plan.num_rows)]
        return [
            (row, int(first[row]), counts[row])
            for row in range(plan.num_decode, plan.num_rows)
            if counts[row]
        ]

    def no_slot_record(self) -> Int32:
        """A record for a slot that does not exist: writes nothing."""
        return pack_slot(self._slots, self._slots.num_slots, np.zeros(0, np.int32))

    def _slot_record(self, request: Request) -> Int32:
        prepared: Prepared = request.params
        return pack_slot(
            self._slots,
            request.slot,
            request.token_ids,
            prepared.edits,
            prepared.bad_words,
            prepared.wire.params.allowed_token_ids,
        )


def pack_step(
    packers: Sequence[Packer],
    plans: Sequence[StepPlan | None],
    tables: Sequence[Sequence[Int32]],
    shape: tuple[Bucket, int],
) -> Batch:
    """The batch of a step, a plan or None from every shard; all in one shape: forward bucket and
    sampler rows."""
    seeds = [[] if plan is None else p.seeds(plan) for p, plan in zip(packers, plans, strict=True)]
    bucket, rows = shape
    parts = [
        packer.empty(bucket, rows)
        if plan is None
        else packer.pack(plan, tables[i], bucket, rows, i, seeds[i])
        for i, (packer, plan) in enumerate(zip(packers, plans, strict=True))
    ]
    return parts[0] if len(parts) == 1 else _join(packers[0], parts)


def step_sizes(plans: Sequence[StepPlan | None]) -> tuple[int, int, bool, int]:
    """The sizes that decide a step's shape, given a plan or None from every shard: most tokens and
    most rows of a shard, whether the decode program will do, fewest tokens of a shard."""
    live = [plan for plan in plans if plan is not None]
    return (
        max((plan.num_tokens for plan in live), default=0),
        max((plan.num_rows for plan in live), default=0),
        all(_one_token_each(plan) for plan in live),
        min(0 if plan is None else plan.num_tokens for plan in plans),
    )


def _one_token_each(plan: StepPlan) -> bool:
    """The decode program will do: it has room for the last token of a prompt, but gives no hidden
    states of prompts."""
    if plan.num_tokens > plan.num_rows:
        return False
    wires = [request.params.wire for request in plan.requests[plan.num_decode :]]
    return not any(w.params.prompt_logprobs is not None or w.pooling is not None for w in wires)


def _join(packer: Packer, parts: list[Batch]) -> Batch:
    prompt_rows = [where for part in parts for where in part.prompt_rows]
    targets = None
    if prompt_rows:
        none = np.zeros(parts[0].bucket.tokens, np.int32)
        targets = np.concatenate(
            [none if p.prompt_targets is None else p.prompt_targets for p in parts]
        )
    index = None
    if any(part.pool_index is not None for part in parts):
        nobody = np.full(parts[0].bucket.tokens, NO_ROW, np.int32)
        index = np.concatenate([nobody if p.pool_index is None else p.pool_index for p in parts])
    # The device writes one record a shard at a time.
    rounds = max(len(part.seeds) for part in parts)
    nothing = [packer.no_slot_record()] * rounds
    seeds = [(part.seeds + nothing)[:rounds] for part in parts]
    return Batch(
        bucket=parts[0].bucket,
        blob=np.concatenate([part.blob for part in parts]),
        sampler_rows=parts[0].sampler_rows,
        rows_blob=np.concatenate([part.rows_blob for part in parts]),
        num_rows=tuple(part.num_rows[0] for part in parts),
        seeds=[np.concatenate(records) for records in zip(*seeds, strict=True)],
        want_logprobs=any(part.want_logprobs for part in parts),
        masked=any(part.masked for part in parts),
        prompt_rows=prompt_rows,
        prompt_targets=targets,
        pool_index=index,
    )


def _record(
    wire: EngineRequest,
    seed: int,
    edits: list[tuple[int, int, float]],
    words: list[list[int]],
) -> Int32:
    params = wire.params
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    flags = HAS_EDITS if edits else 0
    flags |= HAS_ALLOW if params.allowed_token_ids is not None else 0
    flags |= HAS_BAD_WORDS if words else 0
    flags |= HAS_PENALTIES if penalties != (1.0, 0.0, 0.0) else 0
    record = np.zeros(len(SAMPLING_COLUMNS), np.int32)
    floats = [params.temperature, params.top_p, params.min_p, *penalties]
    record[: len(floats)] = np.asarray(floats, np.float32).view(np.int32)
    record[len(floats) :] = [
        min(max(params.top_k, 0), 2**31 - 1),
        *np.asarray([seed % 2**64], np.uint64).view(np.int32).tolist(),
        len(wire.prompt_token_ids),
        _count(params.logprobs),
        _count(params.prompt_logprobs),
        params.min_tokens,
        flags,
    ]
    return record


def _count(asked: int | None) -> int:
    """-1 for none; a request for all (-1) is as many as the program returns."""
    if asked is None:
        return -1
    return asked if asked >= 0 else 2**30


def _edits(wire: EngineRequest) -> tuple[list[tuple[int, int, float]], list[list[int]]]:
    """(token, kind, value) edits, and the bad words of several tokens. Raises ValueError."""
    params = wire.params
    edits = [(token, EDIT_ADD, value) for token, value in (params.logit_bias or {}).items()]
    edits += [(w[0], EDIT_BAN, 0.0) for w in wire.bad_words_token_ids if len(w) == 1]
    if params.min_tokens > 0:
        stops = [*wire.eos_token_ids, *(params.stop_token_ids or ())]
        edits += [(token, EDIT_MIN_TOKENS, 0.0) for token in dict.fromkeys(stops)]
    words = [w for w in wire.bad_words_token_ids if len(w) > 1]
    if len(edits) > MAX_EDITS:
        raise ValueError(
            f"logit_bias, bad_words and stop ids under min_tokens name {len(edits)} tokens in "
            f"all, more than {MAX_EDITS}"
        )
    if len(words) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words holds {len(words)} words, more than {MAX_BAD_WORDS}")
    if any(len(word) > MAX_BAD_WORD_LEN for word in words):
        raise ValueError(f"bad_words holds a word of more than {MAX_BAD_WORD_LEN} tokens")
    return edits, words
