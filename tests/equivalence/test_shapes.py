"""Bucket edges, padding and compilations (B04, B32, B54)."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import psutil
import pytest
from engine_runs import (
    MAX_LEN,
    ONE_ROW,
    THREE_ROWS,
    TIGHT,
    TIGHT_16,
    Seen,
    alone,
    depth,
    engine,
    fill_kv,
    ids_of,
    kv_rows,
    no_compilation,
    oracle_engine,
    prompt_of,
    random_request,
    recorded_plans,
    request,
    run,
)

from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import EngineRequest

EDGES = {
    "one row, 17 tokens": ONE_ROW,
    "three rows, 63 tokens": THREE_ROWS,
    "five rows, 40 tokens": TIGHT,
}


@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=[pytest.mark.slow] if "one" not in s else []) for s in EDGES],
)
def test_lengths_at_every_edge_of_the_buckets(shape: str) -> None:
    core = engine(**EDGES[shape], warmup="full")
    most = core.facts.sched_sizes.max_num_batched_tokens
    edges = {b.tokens for b in core.facts.step_shapes.buckets} | {64, most, 2 * most}
    lengths = sorted({n + d for n in edges for d in (-1, 0, 1) if 0 < n + d < MAX_LEN - 4})
    rng = random.Random(shape)
    requests = [request(f"{n}", prompt_of(rng, n), max_tokens=4) for n in lengths]
    want = ids_of(alone(oracle_engine(), requests))
    fill_kv(core, float("nan"))  # whatever was never written must not matter
    try:
        with no_compilation():
            got = ids_of(alone(core, requests))
            together = ids_of(run(core, requests))
    finally:
        fill_kv(core, 0.0)
    assert got == want
    assert together == want
    assert core.stats().compilations_after_warmup == 0


def test_buckets_never_exceed_the_budget() -> None:
    for settings in EDGES.values():
        core = engine(**settings)
        sched_sizes = core.facts.sched_sizes
        sizes = [b.tokens for b in core.facts.step_shapes.buckets]
        assert max(sizes) == sched_sizes.max_num_batched_tokens


def test_a_batch_that_shrinks_from_five_to_one() -> None:
    core = engine(**TIGHT, warmup="full")
    rng = random.Random(5)
    requests = [request(f"{i}", prompt_of(rng, 5 + i), max_tokens=3 + 4 * i) for i in range(5)]
    want = ids_of(alone(oracle_engine(), requests))
    with no_compilation(), recorded_plans(core) as plans:
        assert ids_of(run(core, requests)) == want
    assert {1, 2, 3, 4, 5} <= {plan.num_rows for plan in plans if plan.num_decode == plan.num_rows}


@pytest.mark.parametrize("shape", list(EDGES)[1:])
def test_a_step_writes_its_own_token_slots_only(shape: str) -> None:
    core = engine(**EDGES[shape])
    rng = random.Random(7)
    requests = [request(f"{i}", prompt_of(rng, 9 + 6 * i), max_tokens=4 + i) for i in range(4)]
    steps: list[list[int]] = []
    kv = [kv_rows(core)]

    def compare(core: EngineCore, _step: int) -> None:
        kv.append(kv_rows(core))
        changed = np.flatnonzero((kv[-2] != kv[-1]).any(axis=1)).tolist()
        assert changed == (sorted(steps.pop()) if steps else [])
        del kv[0]

    with depth(core, 1), recorded_plans(core, slots=steps) as plans:
        run(core, requests, compare)
    most = core.facts.sched_sizes.max_num_batched_tokens
    assert any(p.num_decode < p.num_rows and p.num_tokens < most for p in plans)
    assert any(p.num_rows == 3 for p in plans)
    assert len(plans) >= 8


def test_three_hundred_random_requests_compile_nothing() -> None:
    core = engine(**TIGHT, warmup="full")
    rng = random.Random(300)
    waiting = [random_request(rng, f"{i}") for i in range(300)]
    wires = {wire.request_id: wire for wire in waiting}

    def join(core: EngineCore, _step: int) -> None:
        while waiting and core.stats().num_waiting < 3:
            core.add_request(waiting.pop())

    with no_compilation():
        seen = run(core, [], join)
    assert not waiting and core.stats().compilations_after_warmup == 0
    assert seen.keys() == wires.keys()
    for name, got in seen.items():
        check_promises(wires[name], got)


def check_promises(wire: EngineRequest, got: Seen) -> None:
    """What holds for every output, whatever was sampled."""
    params = wire.params
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else wire.eos_token_ids)}
    if got.error:  # a ban of every allowed token leaves nothing legal
        assert params.allowed_token_ids and wire.bad_words_token_ids
        return
    assert got.finish in ("stop", "length")
    assert len(got.ids) <= params.max_tokens
    if got.finish == "stop":
        assert got.ids[-1] in stops and len(got.ids) > params.min_tokens
    else:
        assert len(got.ids) == params.max_tokens
    assert not stops & set(got.ids[:-1])
    if params.allowed_token_ids:
        assert set(got.ids) <= set(params.allowed_token_ids)
    for word in wire.bad_words_token_ids:
        found = [got.ids[i : i + len(word)] for i in range(len(got.ids))]
        assert word not in found
    if params.logprobs is not None:
        assert [entry.token_ids[0] for entry in got.logprobs] == got.ids
        assert all(len(entry.token_ids) == 1 + params.logprobs for entry in got.logprobs)
        assert all(np.isfinite(entry.logprobs).all() for entry in got.logprobs)
    else:
        assert not got.logprobs
    if params.prompt_logprobs is not None:
        assert [e and e.token_ids[0] for e in got.prompt] == [None, *wire.prompt_token_ids[1:]]
    else:
        assert got.prompt is None


def test_prompt_logprobs_of_every_length_compile_nothing_and_keep_no_memory() -> None:
    core = oracle_engine()
    rng = random.Random(32)

    def ask(length: int) -> None:
        wire = request(f"{length}", prompt_of(rng, length), max_tokens=1, prompt_logprobs=1)
        if length % 3 == 0:
            wire.params = _with(wire.params, logprobs=5)
        if length % 5 == 0:
            wire.params = _with(wire.params, prompt_logprobs=None)
        run(core, [wire])

    for length in (1, 60, 61, 128, 188, 189, 190):
        ask(length)
    programs = core.stats().num_compilations
    memory = psutil.Process().memory_info().rss
    with no_compilation():
        for length in range(1, 191):
            ask(length)
    assert core.stats().num_compilations == programs
    assert psutil.Process().memory_info().rss < 1.05 * memory
    assert core.pipeline.collected.is_empty


def _with(params: SamplingParams, **changes: int | None) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


CHUNKS = {
    16: {"max_num_seqs": 1, "max_num_batched_tokens": 16, "warmup": "lazy"},
    17: {**ONE_ROW, "warmup": "full"},
    32: TIGHT_16,
    63: THREE_ROWS,
}


@pytest.mark.parametrize("size", CHUNKS)
def test_a_chunked_prompt_is_like_a_whole_one(size: int) -> None:
    core = engine(**CHUNKS[size])
    rng = random.Random(54)
    kinds = [
        {},
        {"temperature": 1.0, "seed": 7},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 0.8, "seed": 8, "logprobs": 2, "bad_words": [[5, 6], [7]]},
    ]
    # 101 = 6 * 16 + 5; a length of k * 16 + 1 ends in a chunk of one token.
    lengths = [101, 97, 64, 120]
    requests = [
        request(f"{i}", prompt_of(rng, n), max_tokens=6, **kind)
        for i, (n, kind) in enumerate(zip(lengths, kinds, strict=True))
    ]
    want = alone(oracle_engine(), requests)
    with recorded_plans(core) as plans:
        got = run(core, requests)
    assert ids_of(got) == ids_of(want)
    assert all(len(one.ids) == 6 for one in got.values())
    assert max(plan.num_tokens for plan in plans) <= size
    if size == 16:
        assert any(plan.num_new[-1] == 1 and plan.num_decode < plan.num_rows for plan in plans)
