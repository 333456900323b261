"""What one request asks holds beside others, behind a cache and in chunks (B08, B10, B24, B26)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_runs import (
    EOS,
    TIGHT,
    TIGHT_16,
    VOCAB,
    Seen,
    alone,
    engine,
    ids_of,
    oracle_engine,
    prompt_of,
    request,
    run,
)

from jaxengine.engine.core import EngineCore

# -- B08: prompt log-probabilities -----------------------------------------------------------


def same_prompt_logprobs(got: Seen, want: Seen) -> None:
    assert got.prompt is not None and want.prompt is not None
    assert got.prompt[0] is None and len(got.prompt) == len(want.prompt)
    for a, b in zip(got.prompt[1:], want.prompt[1:], strict=True):
        assert a is not None and b is not None
        assert a.token_ids[0] == b.token_ids[0]
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(TIGHT, id="blocks of 4"),
        pytest.param(TIGHT_16, id="blocks of 16", marks=pytest.mark.slow),
    ],
)
def test_prompt_logprobs_behind_cache_chunks_and_preemption(shape: dict[str, Any]) -> None:
    core = engine(**shape)
    size = core.facts.sched_sizes.block_size
    rng = random.Random(8)
    prompts = [prompt_of(rng, n) for n in (size - 1, size, size + 1, 5 * size + 3, 100)]
    prompts.append(prompts[3][: 2 * size] + prompt_of(rng, 9))  # shares a prefix

    def asked() -> list[Any]:
        return [
            request(f"{i}", prompt, max_tokens=1, prompt_logprobs=2)
            for i, prompt in enumerate(prompts)
        ]

    want = alone(oracle_engine(), asked())
    for one, prompt in zip(want.values(), prompts, strict=True):
        assert one.prompt is not None
        assert [e.token_ids[0] for e in one.prompt[1:] if e] == prompt[1:]
    warm = [request(f"w{i}", prompt) for i, prompt in enumerate(prompts)]
    rounds = [alone(core, asked()), alone(core, asked()), run(core, asked())]
    core.scheduler.reset_prefix_cache()
    run(core, warm)  # the cache now holds what others computed
    rounds += [alone(core, asked()[::-1])]
    preemptions = core.stats().num_preemptions
    crowd = [request(f"c{i}", prompt_of(rng, 30), max_tokens=50) for i in range(3)]
    rounds.append(run(core, crowd[:2] + asked() + crowd[2:]))
    long = [
        request(f"{i}", prompt, max_tokens=50, prompt_logprobs=2)
        for i, prompt in enumerate(prompts)
    ]
    rounds.append(run(core, long))  # they push one another out
    assert core.stats().num_preemptions > preemptions
    for seen in rounds:
        for name, one in want.items():
            same_prompt_logprobs(seen[name], one)
    assert core.pipeline.collected.is_empty


def test_an_aborted_prompt_leaves_nothing_behind() -> None:
    core = engine(**TIGHT)
    wire = request("gone", prompt_of(random.Random(1), 90), prompt_logprobs=1)
    for last_step in range(5):

        def abort(core: EngineCore, step: int, last: int = last_step) -> None:
            if step == last:
                core.abort_requests(["gone"])

        run(core, [wire], abort)
        assert core.pipeline.collected.is_empty


# -- B10: constraints at temperature 0, and beside others ------------------------------------

PROMPT = [17, 4, 230, 99, 5]


def one(core: EngineCore, **params: Any) -> Seen:
    return run(core, [request("x", params.pop("prompt", PROMPT), **params)])["x"]


@pytest.fixture
def core() -> EngineCore:
    return engine(**TIGHT)


def test_constraints_hold_at_temperature_zero(core: EngineCore) -> None:
    plain = one(core).ids
    assert one(core, logit_bias={200: 100.0}).ids == [200] * 8
    assert plain[0] not in one(core, bad_words=[[plain[0]]]).ids
    pair = plain[:2]
    without = one(core, bad_words=[pair]).ids
    assert without[0] == pair[0] and without[1] != pair[1]
    assert one(core, allowed_token_ids=[7]).ids == [7] * 8
    assert set(one(core, allowed_token_ids=[7, 9, 11]).ids) <= {7, 9, 11}
    ends = one(core, ignore_eos=False, logit_bias={EOS: 100.0})
    assert (ends.ids, ends.finish) == ([EOS], "stop")
    later = one(core, ignore_eos=False, logit_bias={EOS: 100.0}, min_tokens=4)
    assert EOS not in later.ids[:4] and later.ids[4:] == [EOS] and later.finish == "stop"
    stop = one(core, stop_token_ids=[plain[2]], min_tokens=0)
    assert stop.ids == plain[: plain.index(plain[2]) + 1] and stop.stop_reason == plain[2]
    once = one(core, presence_penalty=2.0, frequency_penalty=2.0, max_tokens=30).ids
    assert len(set(once)) > len(set(one(core, max_tokens=30).ids))
    assert one(core, temperature=0.0, top_p=0.9).ids == plain
    assert one(core, temperature=0.0, seed=5, top_k=3).ids == plain


def test_nothing_legal_ends_that_request_alone(core: EngineCore) -> None:
    wires = [
        request("none", PROMPT, allowed_token_ids=[7], bad_words=[[7]]),
        request("fine", PROMPT),
    ]
    seen = run(core, wires)
    assert seen["none"].finish == "error" and seen["none"].error
    assert seen["fine"].ids == one(core).ids


def test_a_mixed_batch_is_like_each_row_alone(core: EngineCore) -> None:
    rng = random.Random(10)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "top_k": 5, "seed": 2},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 1.0, "top_p": 0.1, "seed": 3},
        {"temperature": 1.2, "min_p": 0.05, "seed": -4, "logprobs": 3},
        {"bad_words": [[3], [5, 6]], "logit_bias": {40: 3.0}},
        {"temperature": 0.9, "allowed_token_ids": list(range(50, 90)), "seed": 6},
        {"temperature": 1.0, "frequency_penalty": 0.5, "seed": 7},
        {"min_tokens": 6, "stop_token_ids": list(range(3, 200))},
    ]
    wires = [
        request(f"{i}", prompt_of(rng, 4 + i), max_tokens=16, **kind)
        for i, kind in enumerate(kinds)
    ]
    want = ids_of(alone(oracle_engine(), wires))
    for _ in range(4):
        rng.shuffle(wires)
        assert ids_of(run(core, wires)) == want


def test_unseeded_runs_differ_and_seeded_ones_do_not(core: EngineCore) -> None:
    unseeded = [tuple(one(core, temperature=1.5).ids) for _ in range(20)]
    assert len(set(unseeded)) > 10
    seeded = {tuple(one(core, temperature=1.5, seed=9).ids) for _ in range(3)}
    assert len(seeded) == 1
    assert all(0 <= token < VOCAB for ids in unseeded for token in ids)


# -- B24: a shared prefix at once ------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rounds"), [(TIGHT, 20), (TIGHT_16, 3)], ids=["blocks of 4", "chunked prefix"]
)
def test_a_prefix_is_found_only_when_its_kv_is_there(shape: dict[str, Any], rounds: int) -> None:
    core = engine(**shape)
    rng = random.Random(24)
    shared = prompt_of(rng, 8 * core.facts.sched_sizes.block_size)
    wires = [
        request(f"{i}", shared + prompt_of(rng, rng.randrange(1, 7)), max_tokens=3, logprobs=1)
        for i in range(32)
    ]
    want = alone(oracle_engine(), wires)
    hits = core.stats().prefix_hits
    for turn in range(rounds):
        core.scheduler.reset_prefix_cache()
        rng.shuffle(wires)
        gone = wires[0].request_id if turn % 3 == 2 else ""

        def abort(core: EngineCore, step: int, name: str = gone, at: int = turn % 4) -> None:
            if step == at:
                core.abort_requests([name])

        seen = run(core, wires, abort)
        for name, expected in want.items():
            if name != gone:
                assert seen[name].ids == expected.ids
                values = [entry.logprobs[0] for entry in seen[name].logprobs]
                wanted = [entry.logprobs[0] for entry in expected.logprobs]
                assert values == pytest.approx(wanted, abs=1e-3)
    assert core.stats().prefix_hits > hits


def test_output_is_found_as_a_prefix(core: EngineCore) -> None:
    rng = random.Random(25)
    wire = request("first", prompt_of(rng, 21), max_tokens=20)
    first = run(core, [wire])["first"]
    prompt = [*wire.prompt_token_ids, *first.ids, 8]
    again = request("again", prompt, max_tokens=6)
    seen = run(core, [again])["again"]
    assert seen.cached >= 36
    assert seen.ids == run(oracle_engine(), [again])["again"].ids


# -- B26: max_tokens 0 -----------------------------------------------------------------------


def test_no_token_asked(core: EngineCore) -> None:
    rng = random.Random(26)
    prompt = prompt_of(rng, 50)
    scored = request("scored", prompt, max_tokens=0, prompt_logprobs=1, logprobs=1)
    want = run(oracle_engine(), [request("scored", prompt, max_tokens=1, prompt_logprobs=1)])
    beside = [request(f"{i}", prompt_of(rng, 7), max_tokens=i) for i in range(4)]
    seen = run(core, [scored, *beside, request("plain", prompt, max_tokens=0)])
    for name in ("scored", "plain", "0"):
        assert (seen[name].ids, seen[name].finish) == ([], "length")
        assert seen[name].logprobs == []
    same_prompt_logprobs(seen["scored"], want["scored"])
    assert [len(seen[f"{i}"].ids) for i in range(4)] == [0, 1, 2, 3]


def test_no_limit_asked_ends_at_the_context(core: EngineCore) -> None:
    seen = one(core, prompt=prompt_of(random.Random(3), 180), max_tokens=None)
    assert len(seen.ids) == core.facts.sched_sizes.max_model_len - 180 and seen.finish == "length"


# -- requests that cannot run ----------------------------------------------------------------


def test_a_request_that_cannot_run_ends_alone(core: EngineCore) -> None:
    bias = {token: 1.0 for token in range(300)}
    wires = [
        request("fine", PROMPT),
        request("edits", PROMPT, logit_bias=bias, bad_words=[[t] for t in range(3, 300)]),
        request("words", PROMPT, bad_words=[[5, 6, t] for t in range(65)]),
        request("word", PROMPT, bad_words=[[5] * 17]),
        request("empty", []),
        request("long", prompt_of(random.Random(1), 192)),
    ]
    seen = run(core, wires)
    reasons = {
        "edits": "name 597 tokens",
        "words": "bad_words holds 65 words",
        "word": "a word of more than 16 tokens",
        "empty": "at least one token",
        "long": "192 tokens",
    }
    for name, reason in reasons.items():
        assert seen[name].finish == "error" and reason in str(seen[name].error)
    assert seen["fine"].ids == one(core).ids
