"""Speculation changes the number of steps and nothing else (B13, B14, B51 to B53)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import tokenizers
from engine_runs import (
    MAX_LEN,
    TIGHT,
    VOCAB,
    Seen,
    alone,
    depth,
    engine,
    ids_of,
    oracle_engine,
    prompt_of,
    random_params,
    recorded_plans,
    request,
    run,
)
from tokenizers import decoders, models, pre_tokenizers

from jaxengine.engine.core import EngineCore
from jaxengine.lab.tap import tapped
from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.sched.executor import Verifier
from jaxengine.sched.plan import Int32
from jaxengine.speculate.config import parse_speculative_config
from jaxengine.speculate.driver import Speculator
from jaxengine.structured import GrammarCompiler, Matcher, check_structured
from jaxengine.wire.messages import EngineRequest

CONFIG = {
    "method": "ngram",
    "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 3, 2], [4, 5, 0]],
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
DEPTHS = pytest.mark.parametrize("steps", [1, 2])


def speculating(warmup: str = "lazy") -> EngineCore:
    return engine(**TIGHT, warmup=warmup, speculative_config=CONFIG_TEXT)


CONFIG_TEXT = str(CONFIG).replace("'", '"')


def spec_figures(core: EngineCore) -> dict[str, float]:
    return {k[5:]: v for k, v in core.stats().extra.items() if k.startswith("spec_")}


@contextmanager
def drafter(core: EngineCore, propose: Callable[[str, Int32, int], list[int]]) -> Iterator[None]:
    """Drafts of a function on the host, in the place of the engine's n-grams."""

    class Own:
        def propose(self, request_id: str, tokens: Int32, k: int) -> list[int]:
            return propose(request_id, tokens, k)

        def forget(self, request_id: str) -> None:
            pass

    before = core.pipeline.speculation
    assert before is not None
    config = parse_speculative_config({**CONFIG, "method": "suffix"})
    assert isinstance(core.executor, Verifier)
    speculator = Speculator(config, core.facts.sched_sizes, core.executor, "full")
    speculator._proposer = Own()
    core.pipeline.speculation = speculator
    try:
        yield
    finally:
        core.pipeline.speculation = before


def wrong(request_id: str, tokens: Int32, k: int) -> list[int]:
    return [(int(tokens[-1]) * 7 + 11 * i + len(tokens)) % VOCAB for i in range(k)]


def assert_equal(
    requests: list[EngineRequest], got: dict[str, Seen], oracle: EngineCore | None = None
) -> None:
    want = alone(oracle or oracle_engine(), requests)
    for wire in requests:
        a, b = want[wire.request_id], got[wire.request_id]
        assert (a.ids, a.finish, a.stop_reason) == (b.ids, b.finish, b.stop_reason), wire
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.token_ids[0] == y.token_ids[0] and x.rank == y.rank
            assert x.logprobs == pytest.approx(y.logprobs, abs=1e-3)


def in_turns(core: EngineCore, requests: list[EngineRequest], every: int) -> dict[str, Seen]:
    left = list(requests)

    def before(core: EngineCore, step: int) -> None:
        if left and (step % every == 0 or not core.has_work()):
            core.add_request(left.pop(0))

    return run(core, [], before)


@pytest.mark.slow
@DEPTHS
def test_random_mixes_are_equal(steps: int) -> None:
    """Joins take the batch over all ranges of the schedule; the pool is too small for five."""
    core = speculating("full")
    rng = random.Random(10)
    requests = [
        request(
            f"{i}",
            (prompt_of(rng, rng.randrange(1, 14)) * 4)[: rng.randrange(1, 50)],
            max_tokens=rng.choice([1, 3, 20, 60]),
            **random_params(rng),
        )
        for i in range(18)
    ]
    before, preempted = spec_figures(core), core.stats().num_preemptions
    with depth(core, steps):
        assert_equal(requests, in_turns(core, requests, every=7))
    after = spec_figures(core)
    assert after["num_accepted_tokens"] - before["num_accepted_tokens"] > 50
    for k in (0, 2, 5):
        assert after[f"steps_k{k}"] > before[f"steps_k{k}"]
    assert core.stats().num_preemptions > preempted
    assert core.stats().compilations_after_warmup == 0


def in_equal_time(finished: Callable[..., None], *step: Any) -> None:
    """`Speculator.finished`, its last argument the seconds that a step took."""
    finished(*step[:-1], 0.01)


@pytest.mark.slow
@DEPTHS
@pytest.mark.parametrize("setting", [{"method": "suffix"}, {"method": "ngram", "adaptive": True}])
def test_other_drafters_are_equal(
    setting: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the shapes that are compiled. An adaptive engine begins without running requests; by the
    clock of this test every step takes as long, so that drafts pay on any machine."""
    core = speculating()
    monkeypatch.setattr(core.executor, "open_speculation", lambda *_: None)
    before = core.pipeline.speculation
    core.use_speculation({**CONFIG, **setting})
    rng = random.Random(9)
    requests = [
        request(f"{i}", prompt_of(rng, 8) * 3, max_tokens=rng.choice([5, 40]), **random_params(rng))
        for i in range(16)
    ]
    # Adaptive K needs steps of equal size to learn from.
    requests += [request(f"long {i}", [7, 8, 9] * 4, max_tokens=120) for i in range(2)]
    try:
        with depth(core, steps), tapped(core.pipeline.speculation, finished=in_equal_time):
            assert_equal(requests, in_turns(core, requests, every=7))
        figures = spec_figures(core)
    finally:
        core.pipeline.speculation = before
    assert figures["num_draft_tokens"] > 20
    assert figures["steps_k0"] > 0
    assert sum(figures[f"steps_k{k}"] for k in range(1, 6)) > 5


def constant(name: str, **params: Any) -> EngineRequest:
    """All its tokens are 7: every draft is accepted."""
    return request(name, [7] * 6, **{"allowed_token_ids": [7], "logprobs": 2, **params})


@DEPTHS
def test_a_run_of_accepted_drafts_ends_where_it_must(steps: int) -> None:
    """B13: max_tokens, a stop id and min_tokens inside the accepted run."""
    core = speculating()
    bias = {9: 5.0, 8: 8.0}
    requests = [constant(f"most {n}", max_tokens=n) for n in range(8)]
    requests += [
        # the penalty lets 8, 7 and the stop id 9 take turns
        request("stop", [7, 8] * 4, max_tokens=40, allowed_token_ids=[7, 8, 9], logprobs=1,
                logit_bias=bias, frequency_penalty=1.0, stop_token_ids=[9]),
        request("late stop", [7] * 8, max_tokens=40, allowed_token_ids=[7, 9], logprobs=1,
                logit_bias={9: 50.0}, min_tokens=9, stop_token_ids=[9]),
        request("eos", [7] * 8, max_tokens=40, allowed_token_ids=[7, 2], min_tokens=7,
                logit_bias={2: 50.0}, ignore_eos=False),
    ]  # fmt: skip
    accepted = spec_figures(core)["num_accepted_tokens"]
    with depth(core, steps):
        got = alone(core, requests)
    assert_equal(requests, got)
    assert [len(got[f"most {n}"].ids) for n in range(8)] == list(range(8))
    assert got["late stop"].finish == "stop" and len(got["late stop"].ids) == 10
    given = sum(len(one.ids) for one in got.values())
    assert given / 3 < spec_figures(core)["num_accepted_tokens"] - accepted < given


VARIANTS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 2.0},
    "negative frequency": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 100.0, 6: 99.9}, "frequency_penalty": 0.3},
    "bad words": {"bad_words": [[7], [8, 8, 8], [8, 9]], "allowed_token_ids": [7, 8, 9, 10]},
    "min_p": {"min_p": 0.5, "temperature": 1.0, "seed": 3},
    "seeded": {"temperature": 1.2, "seed": 4, "top_p": 0.9, "allowed_token_ids": [7, 8, 9]},
    "allowed": {"allowed_token_ids": [3, 4, 5]},
}


@DEPTHS
def test_every_place_has_its_own_penalties(steps: int) -> None:
    """B52: all alone (K = 5), with right and with wrong drafts."""
    core = speculating()
    rng = random.Random(52)
    requests = [
        request(name, prompt_of(rng, 6) * 3, max_tokens=30, **params)
        for name, params in VARIANTS.items()
    ]
    with depth(core, steps):
        assert_equal(requests, alone(core, requests))
    want = ids_of(alone(oracle_engine(), requests))

    def right(request_id: str, tokens: Int32, k: int) -> list[int]:
        done = len(tokens) - 18
        return want[request_id][done : done + k]

    for propose in (right, wrong):
        with depth(core, steps), drafter(core, propose):
            assert_equal(requests, alone(core, requests))
            figures = spec_figures(core)
            share = figures["num_accepted_tokens"] / figures["num_draft_tokens"]
            assert share == 1.0 if propose is right else share < 0.2


def test_no_draft_goes_beyond_the_context() -> None:
    """B53: prompts that nearly fill it."""
    core = speculating()
    requests = [
        constant(f"{n}", max_tokens=None)
        if n == 0
        else request(f"{n}", [7] * (MAX_LEN - n), max_tokens=None, allowed_token_ids=[7])
        for n in range(9)
    ]
    with recorded_plans(core) as plans:
        assert_equal(requests, run(core, requests))
    assert max(int((plan.start + plan.num_new).max()) for plan in plans) <= MAX_LEN
    assert any(plan.num_drafts.any() for plan in plans)


@DEPTHS
def test_no_drafts_beyond_the_drafters_length(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`max_model_len` of the drafter: longer requests go on without drafts."""
    core = speculating()
    monkeypatch.setattr(core.executor, "open_speculation", lambda *_: None)
    before = core.pipeline.speculation
    core.use_speculation({**CONFIG, "max_model_len": 60})
    wire = constant("a", max_tokens=120)
    try:
        with depth(core, steps), recorded_plans(core) as plans:
            assert_equal([wire], run(core, [wire]))
    finally:
        core.pipeline.speculation = before
    drafted = [plan for plan in plans if plan.num_drafts.any()]
    assert len(drafted) > 5
    assert 50 < max(int((plan.start + plan.num_new).max()) for plan in drafted) <= 60
    assert sum(plan.num_rows for plan in plans if not plan.num_drafts.any()) > 60


def test_no_drafts_at_k_zero() -> None:
    core = speculating()
    before = spec_figures(core)["num_draft_tokens"]
    with recorded_plans(core) as plans:
        run(core, [constant(f"{i}", max_tokens=12) for i in range(5)])
    for plan in plans:
        assert not (plan.num_rows >= 4 and plan.num_drafts.any() and plan.uncertain.any())
    full = [plan for plan in plans if plan.num_rows == 5 and plan.num_decode == 5]
    assert len(full) > 3 and not any(plan.num_drafts.any() for plan in full)
    assert spec_figures(core)["num_draft_tokens"] >= before


def test_rejected_kv_is_never_found() -> None:
    """What a prefix hit brings is what a prompt would have computed."""
    core = speculating()
    rng = random.Random(4)
    first = [request(f"{i}", prompt_of(rng, 10), max_tokens=50) for i in range(3)]
    with drafter(core, wrong):
        seen = run(core, first)
        assert spec_figures(core)["num_draft_tokens"] > 100
    follow = [
        request(f"again {wire.request_id}", [*wire.prompt_token_ids, *seen[wire.request_id].ids, 5])
        for wire in first
    ]
    got = run(core, follow)
    assert_equal(follow, got)
    assert sum(one.cached for one in got.values()) >= 32


def byte_compiler() -> tuple[tokenizers.Tokenizer, GrammarCompiler, int]:
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tk = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens(["<end>"])
    return tk, GrammarCompiler(tk.to_str(), VOCAB, (len(vocab),)), len(vocab)


@DEPTHS
def test_grammars_hold(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B14: one legal text, near misses of it in the prompt, beside unconstrained requests."""
    core = speculating()
    tk, compiler, eos = byte_compiler()
    text = '{"colour":"green","size":"large"}'
    fields = StructuredOutputsParams(regex=re.escape(text))
    spec = check_structured(fields)
    assert spec is not None
    compiler.compile(spec).result(timeout=60)
    prompt = tk.encode('{"colour":"grey","size":"largest"}{"colour":"green","size":"lax"}').ids

    def matcher(wire: EngineRequest) -> Matcher | None:
        return compiler.matcher(spec) if wire.request_id.startswith("json") else None

    monkeypatch.setattr(core._parts.grammars, "matcher", matcher)
    free = [request(f"{i}", [7, 8, 9] * 6, max_tokens=25) for i in range(3)]
    asked = [request(f"json{i}", prompt, max_tokens=80, temperature=i * 0.4, seed=i)
             for i in range(6)]  # fmt: skip
    asked = [msgspec.structs.replace(wire, eos_token_ids=[eos]) for wire in asked]
    accepted = spec_figures(core)["num_accepted_tokens"]
    with depth(core, steps):
        got = in_turns(core, [*asked[:4], *free, *asked[4:]], every=9)
    for wire in asked:
        one = got[wire.request_id]
        assert one.error is None and one.finish == "stop" and one.ids[-1] == eos
        assert tk.decode(one.ids, skip_special_tokens=True) == text
    assert_equal(free, got)
    assert spec_figures(core)["num_accepted_tokens"] > accepted
    compiler.close()
