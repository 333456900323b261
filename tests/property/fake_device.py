"""A device that can be fooled: its next token depends on every KV entry it reads.

The KV entry of position p is a hash of all tokens up to p, made from the entry of p - 1 as it is
found through the block table. So a wrong block, a lost or repeated token, a block freed too early
or a prefix hit on something not yet written changes the output, and `oracle` notices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request

MODULUS = 2_147_483_647
VOCAB = 61


def entry(previous: int, token: int) -> int:
    return (previous * 48_271 + token * 69_621 + 12_345) % MODULUS


def next_token(windows: list[np.ndarray]) -> int:
    """From the KV entries that each group sees: [group][positions]."""
    return int(sum(int(w.sum()) * (g + 3) for g, w in enumerate(windows)) % MODULUS % VOCAB)


def oracle(prompt: list[int], count: int, windows: list[int], ends: set[int]) -> list[int]:
    """Output tokens of the model, run alone, without cache or blocks."""
    entries: list[int] = []
    for token in prompt:
        entries.append(entry(entries[-1] if entries else 1, token))
    output: list[int] = []
    while len(output) < count:
        seen = np.array(entries, np.int64)
        token = next_token([seen[-w:] if w else seen for w in windows])
        output.append(token)
        if token in ends:
            break
        entries.append(entry(entries[-1], token))
    return output


@dataclass
class FakeDevice:
    """Runs every plan at once, in order; only its results come late."""

    config: SchedulerSizes
    block_tables: list[np.ndarray]
    last_token: np.ndarray = field(init=False)
    computed: np.ndarray = field(init=False)
    kv: list[np.ndarray] = field(init=False)
    writes: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        slots, c = self.config.max_num_seqs, self.config
        self.last_token = np.full(slots, -7, np.int64)
        self.computed = np.full(slots, -1, np.int64)
        self.kv = [np.full((c.num_blocks, c.block_size), -1, np.int64) for _ in c.groups]

    def lose(self, plan: StepPlan) -> None:
        """As if the step had never run: what it wrote is garbage."""
        for group, block, offset in self.writes[plan.step_id]:
            self.kv[group][block, offset] = -1

    def run(self, plan: StepPlan) -> StepResult:
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(set(plan.slots.tolist())) == plan.num_rows
        self.written = self.writes[plan.step_id] = []
        self.writes.pop(plan.step_id - 8, None)
        for request in plan.new_requests:
            self.last_token[request.slot] = self.computed[request.slot] = -7
        width = 1 + self.config.max_drafts
        ids = np.full((plan.num_rows, width), -1, np.int32)
        count = np.zeros(plan.num_rows, np.int32)
        for row, request in enumerate(plan.requests):
            sampled = self._run_row(plan, row, request)
            ids[row, : len(sampled)] = sampled
            count[row] = len(sampled)
        return StepResult(token_ids=ids, num_sampled=count)

    def _run_row(self, plan: StepPlan, row: int, request: Request) -> list[int]:
        slot, start, n = int(plan.slots[row]), int(plan.start[row]), int(plan.num_new[row])
        drafts = int(plan.num_drafts[row])
        if row < plan.num_decode:
            assert n == 1 + drafts
        if row < plan.num_decode or drafts:
            assert self.last_token[slot] >= 0, "a decode row without a last token"
            assert self.computed[slot] <= start
            start = int(self.computed[slot])
            tokens = [int(self.last_token[slot]), *request.spec_token_ids[:drafts]]
        else:
            assert start + n <= request.num_tokens, "a prefill row of unknown tokens"
            tokens = request.token_ids[start : start + n].tolist()
        assert len(tokens) == n
        outputs: list[int] = []
        for i, token in enumerate(tokens):
            self._write(slot, start + i, token)
            if plan.samples[row] and i >= n - 1 - drafts:
                outputs.append(self._read(slot, start + i))
                if i + 1 < n and tokens[i + 1] != outputs[-1]:
                    break
        self.computed[slot] = start + n - (drafts + 1 - len(outputs) if outputs else 0)
        if outputs:
            self.last_token[slot] = outputs[-1]
        return outputs

    def _write(self, slot: int, position: int, token: int) -> None:
        size = self.config.block_size
        for group, (table, kv) in enumerate(zip(self.block_tables, self.kv, strict=True)):
            previous = 1
            if position:
                block = table[slot, (position - 1) // size]
                assert block < self.config.num_blocks, "reads a block that is not there"
                previous = int(kv[block, (position - 1) % size])
            block = table[slot, position // size]
            assert block < self.config.num_blocks, "writes a block that is not there"
            kv[block, position % size] = entry(previous, token)
            self.written.append((group, int(block), position % size))

    def _read(self, slot: int, position: int) -> int:
        size = self.config.block_size
        seen = []
        for group, table, kv in zip(self.config.groups, self.block_tables, self.kv, strict=True):
            first = max(0, position + 1 - group.window) if group.window else 0
            positions = np.arange(first, position + 1)
            blocks = table[slot, positions // size]
            assert (blocks < self.config.num_blocks).all(), "attends to a block that is not there"
            seen.append(kv[blocks, positions % size])
        return next_token(seen)
