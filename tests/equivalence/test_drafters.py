"""Drafters with a model: the same tokens as without, and drafts that are what they should be."""

from __future__ import annotations

import pathlib
import random
import re

import msgspec
import numpy as np
import pytest
from drafters import METHODS, drafting, recorded_drafts
from engine_runs import (
    alone,
    depth,
    no_compilation,
    oracle_engine,
    prompt_of,
    random_params,
    recorded_plans,
    request,
    run,
)
from test_speculation import assert_equal, byte_compiler, in_turns, spec_figures

from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured import Matcher, check_structured
from jaxengine.wire.messages import EngineRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("drafters")


def oracle_of(core: EngineCore) -> EngineCore:
    return oracle_engine(core.config.model.model)


def mix(rng: random.Random, count: int) -> list[EngineRequest]:
    """Prompts of several chunks, some of which begin alike; outputs that do not fit together."""
    shared = prompt_of(rng, 40)
    return [
        request(
            f"{i}",
            [*shared[: rng.choice([0, 20, 40, 40])], *prompt_of(rng, rng.randrange(1, 30))],
            max_tokens=rng.choice([1, 3, 40, 80, 80]),
            **random_params(rng),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.slow] if m != "eagle" else []) for m in METHODS],
)
def test_random_mixes_are_equal(method: str, folder: pathlib.Path) -> None:
    """Joins and ends take the batch through K = 0, 1 and 3; the pool is too small for three."""
    core = drafting(method, folder, "full")
    rng = random.Random(31)
    for steps in (2, 1):
        core.scheduler.reset_prefix_cache()
        before, preempted = spec_figures(core), core.stats().num_preemptions
        requests = mix(rng, 14)
        with depth(core, steps), no_compilation():
            got = in_turns(core, requests, every=6)
        assert_equal(requests, got, oracle_of(core))
        after = spec_figures(core)
        assert after["num_draft_tokens"] - before["num_draft_tokens"] > 100
        for k in (0, 1, 3):
            assert after[f"steps_k{k}"] > before[f"steps_k{k}"]
        assert core.stats().num_preemptions > preempted
        assert any(one.cached for one in got.values())
    assert core.stats().compilations_after_warmup == 0


def assert_same_kv(core: EngineCore) -> None:
    """The draft model's KV of all that is computed equals the target's, which it is itself."""
    runner = core.executor
    pools = [
        np.concatenate([np.asarray(x).reshape(-1, x.shape[-1]) for pair in kv for x in pair], 1)
        for kv in (runner._state.kv, runner._drafts._kv)
    ]
    state, size = core.scheduler.state, core.facts.sched_sizes.block_size
    for one in state.running:
        position = np.arange(state.table.num_computed[one.slot])
        at = core.scheduler.block_tables[0][one.slot, position // size] * size + position % size
        np.testing.assert_allclose(pools[1][at], pools[0][at], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_drafts_of_the_model_itself_are_all_right(steps: int, folder: pathlib.Path) -> None:
    """Its KV is where the target's is, whatever happens: every greedy draft is accepted."""
    core = drafting("itself", folder)
    rng = random.Random(5)
    shared = prompt_of(rng, 45)
    requests = [
        request(f"{i}", [*shared[: 15 * (i % 4)], *prompt_of(rng, 20)], max_tokens=(80, 30)[i % 2])
        for i in range(9)
    ]
    preempted = core.stats().num_preemptions
    left = list(requests)

    def before(core: EngineCore, step: int) -> None:
        if left and (step % 6 == 0 or not core.has_work()):
            core.add_request(left.pop(0))
        if steps == 1:  # nothing is in flight
            assert_same_kv(core)

    with depth(core, steps), recorded_drafts(core) as record:
        got = run(core, [], before)
    assert core.stats().num_preemptions > preempted
    assert any(one.cached for one in got.values())
    drafted = sum(
        int(one.num_drafted.sum()) for one in record.results if one.num_drafted is not None
    )
    assert drafted > 50
    for one in record.results:
        assert one.num_drafted is not None
        assert (one.num_sampled == 1 + one.num_drafted).all()


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.slow] if m in ("mtp", "eagle") else []) for m in METHODS],
)
def test_drafts_depend_on_the_tokens_alone(method: str, folder: pathlib.Path) -> None:
    """What is drafted after many steps of every kind is what a fresh prompt of the same tokens
    would have drafted."""
    core = drafting(method, folder)
    rng = random.Random(6)
    requests = [request(f"{i}", prompt_of(rng, 10 + 17 * i), max_tokens=30) for i in range(4)]
    with recorded_drafts(core) as record:
        in_turns(core, requests, every=6)
    assert len(record.drafts) > 25
    chosen = rng.sample(sorted(record.drafts), 12)
    with recorded_drafts(core) as fresh:
        for i, tokens in enumerate(chosen):
            # The last token is sampled again: drafts come after a step without any.
            again = request(f"{i}", tokens[:-1], max_tokens=5, skip_reading_prefix_cache=True)
            run(core, [again])
    for tokens in chosen:
        both = record.drafts[tokens], fresh.drafts[tokens]
        common = min(map(len, both))
        assert common and both[0][:common] == both[1][:common], tokens
    if method == "eagle":
        assert all(set(drafts) == {tokens[-1]} for tokens, drafts in record.drafts.items())


def test_stops_inside_accepted_runs(folder: pathlib.Path) -> None:
    core = drafting("itself", folder)
    prompt = prompt_of(random.Random(7), 12)
    free = alone(oracle_engine(), [request("free", prompt, max_tokens=24)])["free"].ids
    requests = [request(f"most {n}", prompt, max_tokens=n) for n in range(1, 8)]
    requests += [request(f"stop {n}", prompt, max_tokens=24, stop_token_ids=[free[n]])
                 for n in range(2, 9)]  # fmt: skip
    accepted = spec_figures(core)["num_accepted_tokens"]
    assert_equal(requests, alone(core, requests))
    assert spec_figures(core)["num_accepted_tokens"] - accepted > 20


@pytest.mark.parametrize("steps", [1, 2])
def test_rows_with_a_grammar_have_no_drafts(
    steps: int, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay beside rows that have some."""
    core = drafting("eagle", folder)
    tk, compiler, eos = byte_compiler()
    text = '{"colour":"green"}'
    spec = check_structured(StructuredOutputsParams(regex=re.escape(text)))
    assert spec is not None
    compiler.compile(spec).result(timeout=60)

    def matcher(wire: EngineRequest) -> Matcher | None:
        return compiler.matcher(spec) if wire.request_id.startswith("json") else None

    monkeypatch.setattr(core._parts.grammars, "matcher", matcher)
    free = [request(f"{i}", [7, 8, 9] * 6, max_tokens=40) for i in range(2)]
    asked = [request(f"json{i}", tk.encode(text).ids, max_tokens=60, temperature=i * 0.5, seed=i)
             for i in range(4)]  # fmt: skip
    asked = [msgspec.structs.replace(wire, eos_token_ids=[eos]) for wire in asked]
    with depth(core, steps), recorded_plans(core) as plans:
        got = in_turns(core, [asked[0], free[0], asked[1], *asked[2:], free[1]], every=9)
    for wire in asked:
        one = got[wire.request_id]
        assert one.error is None and one.finish == "stop" and one.ids[-1] == eos
        assert tk.decode(one.ids, skip_special_tokens=True) == text
    assert_equal(free, got)
    mixed = 0
    for plan in plans:
        grammar = [request.grammar is not None for request in plan.requests]
        assert not plan.num_drafts[grammar].any()
        mixed += any(grammar) and bool(plan.num_drafts.any())
    assert mixed > 3
    compiler.close()


def test_state_lost_and_found(folder: pathlib.Path) -> None:
    """After a reset, and after sleep, the drafter drafts as before."""
    core = drafting("itself", folder)
    wire = request("a", prompt_of(random.Random(8), 30), max_tokens=30)
    want = alone(oracle_engine(), [wire])["a"].ids
    for disturb in (core.executor.reset, lambda: (core.executor.sleep(2), core.executor.wake_up())):
        core.scheduler.reset_prefix_cache()
        disturb()
        with recorded_drafts(core) as record:
            assert run(core, [wire])["a"].ids == want
        for one in record.results:
            assert one.num_drafted is not None
            assert (one.num_sampled == 1 + one.num_drafted).all()


def test_the_engine_without_its_drafter(folder: pathlib.Path) -> None:
    """`use_speculation` takes the drafter away and gives it back."""
    core = drafting("eagle", folder)
    assert core.config.scheduler.speculative_config is not None
    wire = request("a", [7, 8, 9] * 5, max_tokens=12)
    core.use_speculation(None)
    plain = run(core, [wire])["a"].ids
    core.use_speculation(core.config.scheduler.speculative_config)
    with recorded_drafts(core) as record:
        assert run(core, [wire])["a"].ids == plain
    assert record.drafts
