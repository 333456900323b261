"""NaN in one request's logits or KV stays with that request (B62)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from engine_runs import (
    TIGHT,
    VOCAB,
    alone,
    depth,
    engine,
    ids_of,
    oracle_engine,
    prompt_of,
    request,
    run,
)

from jaxengine.engine.core import EngineCore

POISON = VOCAB - 1  # this token's embedding is NaN


@contextmanager
def poisoned_embedding(core: EngineCore) -> Iterator[None]:
    runner = core.executor
    good = runner.params["embed"]
    bad = np.array(good)
    bad[POISON] = np.nan
    runner.params["embed"] = jax.device_put(bad)
    try:
        yield
    finally:
        runner.params["embed"] = good


def test_the_bad_request_ends_and_the_others_do_not_notice() -> None:
    core = engine(**TIGHT)
    rng = random.Random(62)
    shared = [5, *prompt_of(rng, 20)]
    clean = [request(f"{i}", [*shared, 10 + i], max_tokens=12) for i in range(6)]
    sampled = [
        request(f"s{i}", [*shared, 30 + i], max_tokens=12, temperature=1.0, seed=i)
        for i in range(3)
    ]
    good = [*clean, *sampled]
    want = ids_of(alone(oracle_engine(), good))
    assert not any(POISON in ids for ids in want.values())
    bad = [
        request("prompt", [*shared, POISON, *prompt_of(rng, 30)]),
        request("first", [POISON], temperature=1.0),
        request("later", [*shared, 4], logit_bias={POISON: 1e4}),
        request("scored", [*shared, POISON, 9, 9, 9, 9], prompt_logprobs=1, logprobs=1),
        request("empty", [*shared, POISON], max_tokens=0),
    ]
    with poisoned_embedding(core):
        for steps in (1, 2, 2, 2):
            wires = [*good, *bad]
            rng.shuffle(wires)
            before = core.stats().nan_rows
            with depth(core, steps):
                seen = run(core, wires)
            for wire in bad:
                got = seen[wire.request_id]
                assert got.finish == "error" and got.error
                assert got.ids == ([POISON] if wire.request_id == "later" else [])
            assert {name: seen[name].ids for name in want} == want
            # A surplus row may be in flight behind one that ended its request.
            counted = core.stats().nan_rows - before
            assert counted >= len(bad) and (steps > 1 or counted == len(bad))
        # Their blocks hold NaN now, and others get them: those whose chunks leave some unused.
        for _ in range(3):
            assert ids_of(run(core, good)) == want
    # Nothing of theirs is found by the same prompts once the weights are sound.
    core.scheduler.check_integrity()
    assert ids_of(run(core, bad[:1])) == ids_of(run(oracle_engine(), bad[:1]))
