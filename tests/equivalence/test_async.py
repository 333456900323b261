"""Asynchronous scheduling gives what synchronous scheduling gives (B01, issue 2/9)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from engine_runs import (
    TIGHT,
    TIGHT_16,
    Seen,
    alone,
    depth,
    engine,
    ids_of,
    oracle_engine,
    prompt_of,
    random_request,
    request,
    run,
)

from jaxengine.engine.core import EngineCore
from jaxengine.wire.messages import EngineRequest


@dataclass
class Mix:
    """Requests that join and leave at given steps of the engine."""

    joins: list[tuple[int, EngineRequest]]
    aborts: dict[int, list[str]]

    def through(self, core: EngineCore) -> dict[str, Seen]:
        left = list(self.joins)

        def before(core: EngineCore, step: int) -> None:
            core.abort_requests(self.aborts.get(step, []))
            while left and (left[0][0] <= step or not core.has_work()):
                core.add_request(left.pop(0)[1])

        return run(core, [], before)


def random_mix(rng: random.Random, count: int) -> Mix:
    joins, aborts, step = [], {}, 0
    for i in range(count):
        step += rng.choice([0, 0, 1, 4, 8])
        joins.append((step, random_request(rng, f"{i}", longest=70, most_tokens=60)))
        if rng.random() < 0.1:
            aborts.setdefault(step + rng.randrange(12), []).append(f"{i}")
    return Mix(joins, aborts)


def compare(core: EngineCore, mix: Mix) -> int:
    """Run both ways; returns how many requests ran to their end."""
    with depth(core, 1):
        want = mix.through(core)
        core.scheduler.reset_prefix_cache()
    got = mix.through(core)
    aborted = {name for names in mix.aborts.values() for name in names}
    ended = 0
    for _, wire in mix.joins:
        name = wire.request_id
        a, b = want.get(name, Seen()), got.get(name, Seen())
        if name in aborted:
            shorter, longer = sorted((a.ids, b.ids), key=len)
            assert longer[: len(shorter)] == shorter, wire
            continue
        assert (a.ids, a.finish, a.stop_reason) == (b.ids, b.finish, b.stop_reason), wire
        assert a.finish is not None
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.token_ids[0] == y.token_ids[0]
            assert x.logprobs == pytest.approx(y.logprobs, abs=1e-3)
        assert (a.prompt is None) == (b.prompt is None)
        for p, q in zip(a.prompt or [], b.prompt or [], strict=True):
            assert p is q or p.logprobs == pytest.approx(q.logprobs, abs=1e-3)
        ended += 1
    assert core.pipeline.collected.is_empty
    return ended


@pytest.mark.parametrize("shape", [TIGHT, TIGHT_16], ids=["blocks of 4", "blocks of 16"])
def test_random_mixes_are_equal(shape: dict[str, Any]) -> None:
    core = engine(**shape, warmup="full")
    preemptions = core.stats().num_preemptions
    ended = compare(core, random_mix(random.Random(1), 75))
    assert ended > 60
    assert core.stats().num_preemptions > preemptions
    assert core.stats().compilations_after_warmup == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_thousand_requests_are_equal() -> None:
    total = ended = 0
    preemptions = 0
    for seed in range(20):
        for shape in (TIGHT, TIGHT_16):
            core = engine(**shape)
            preemptions -= core.stats().num_preemptions
            mix = random_mix(random.Random(100 + seed), 50)
            ended += compare(core, mix)
            total += len(mix.joins)
            preemptions += core.stats().num_preemptions
    print(f"{total} requests, {ended} to their end, {preemptions} preemptions: no difference")
    assert total == 2000 and preemptions > 0


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a long prompt joins": {},
    "logprobs": {"logprobs": 1},
    "the cache is reset": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "bad_words": [[3, 103]]},
    "seeds": {"temperature": 1.0, "seed": 11, "presence_penalty": 0.6, "top_p": 0.9},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_preempted_requests_lose_and_repeat_nothing(variant: str) -> None:
    """B01: 12 blocks of 16 tokens for 8 requests that grow to 84."""
    core = engine(**TIGHT_16)
    rng = random.Random(variant)
    asked = VARIANTS[variant]
    requests = [request(f"{i}", prompt_of(rng, 20), max_tokens=64, **asked) for i in range(8)]
    late = [request("late", prompt_of(rng, 150), max_tokens=30)]

    def before(core: EngineCore, step: int) -> None:
        if step == 20 and variant == "a long prompt joins":
            core.add_request(late[0])
        if step in (30, 31, 60) and variant == "the cache is reset":
            core.scheduler.reset_prefix_cache(reset_running=True)

    all_of_them = requests + (late if variant == "a long prompt joins" else [])
    want = ids_of(alone(oracle_engine(), all_of_them))
    preemptions = core.stats().num_preemptions
    seen = run(core, requests, before)
    assert ids_of(seen) == want
    assert core.stats().num_preemptions > preemptions
    assert all(len(seen[f"{i}"].ids) == 64 for i in range(8))
    if "logprobs" in asked:
        assert all(len(one.logprobs) == 64 for one in seen.values())
        assert all([e.token_ids[0] for e in s.logprobs] == s.ids for s in seen.values())


def test_the_setting_chooses_the_depth() -> None:
    assert oracle_engine().pipeline.depth == 1 and oracle_engine().stats().pipeline_depth == 1
    assert engine(**TIGHT).pipeline.depth == 2 and engine(**TIGHT).stats().pipeline_depth == 2
