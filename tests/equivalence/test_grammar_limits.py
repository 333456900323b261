"""Grammars that ask too much of a step, in the engine: their requests end, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import tokenizers
from engine_runs import TIGHT, Seen, alone, depth, engine, ids_of, request, run
from tokenizers import decoders, models, pre_tokenizers

from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured import GrammarCompiler, Matcher, Spec, check_structured
from jaxengine.wire.messages import INVALID_REQUEST, EngineRequest

VOCAB, END = 320, 256
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'


def bomb(prefix: str) -> str:
    """Harmless for a letter, and then a step that takes a minute."""
    names = [f"{prefix}{i}" for i in range(150)]
    rules = [f"{name}: e e" for name in names]
    return "\n".join(["start: /[a-z]/ e", f"e: /[a-z]/ | {' | '.join(names)}", *rules])


SPECS = {
    **{f"bomb{i}": StructuredOutputsParams(grammar=bomb("abc"[i])) for i in range(3)},
    "ambiguous": StructuredOutputsParams(grammar="start: e\ne: e e e e | e e e | e e | /[a-z]/"),
    "lexer": StructuredOutputsParams(regex="((a|b|c|d){1,500}){1,500}"),
    "fine": StructuredOutputsParams(regex="(ab){20}"),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tk = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens(["<end>"])
    made = GrammarCompiler(tk.to_str(), VOCAB, (len(vocab),))
    yield made
    made.close()


def spec_of(name: str) -> Spec:
    spec = check_structured(SPECS[name])
    assert spec is not None
    return spec


def constrain(core: EngineCore, compiler: GrammarCompiler, patch: pytest.MonkeyPatch) -> None:
    """A request has the grammar whose name its own begins with."""

    def matcher(wire: EngineRequest) -> Matcher | None:
        name = wire.request_id.split("-")[0]
        if name not in SPECS:
            return None
        compiler.compile(spec_of(name)).result(timeout=60)
        return compiler.matcher(spec_of(name))

    patch.setattr(core._parts.grammars, "matcher", matcher)


def ended_by_its_constraint(one: Seen) -> bool:
    assert one.error is not None
    return (
        one.finish == "error"
        and one.stop_reason == INVALID_REQUEST
        and one.error.startswith("structured_outputs.")
    )


@pytest.mark.parametrize(
    ("number", "steps", "more"),
    [
        pytest.param(0, 1, {}, id="depth 1"),
        pytest.param(1, 2, {}, id="depth 2"),
        pytest.param(
            2, 2, {"speculative_config": SPECULATION}, id="drafts", marks=pytest.mark.slow
        ),
    ],
)
def test_hostile_grammars_end_alone(
    number: int,
    steps: int,
    more: dict[str, Any],
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """M9, L8: told as the client's mistake, and every other request gets what it gets alone."""
    core = engine(**TIGHT, **more)
    constrain(core, compiler, monkeypatch)
    free = [request(f"{i}", [7, 8, 9, i] * 3, max_tokens=30) for i in range(3)]
    expected = ids_of(alone(core, free))
    prompt = [64, 65, 66, 65] * 2  # letters, for drafts
    fields = {"max_tokens": 180, "temperature": 1.0, "logit_bias": {END: -100}}
    names = (f"bomb{number}-0", f"bomb{number}-1", "ambiguous", "lexer")
    hostile = [request(name, prompt, seed=1, **fields) for name in names]
    fine = request("fine-0", [5, 6, 7], max_tokens=60)
    end = [msgspec.structs.replace(wire, eos_token_ids=[END]) for wire in [*hostile, fine]]
    with depth(core, steps):
        got = run(core, [*end[:4], *free, *end[4:]])
    for wire in hostile:
        assert ended_by_its_constraint(got[wire.request_id]), wire.request_id
    assert {name: got[name].ids for name in expected} == expected
    assert got["fine-0"].error is None and got["fine-0"].finish == "stop"


def test_an_aborted_request_waits_for_its_grammar_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B12: an idle engine makes no step that would notice."""
    core = engine(**TIGHT)
    monkeypatch.setattr(core._parts.grammars, "matcher", lambda _: Matcher(Future(), [END]))
    core.add_request(request("a", [5, 6, 7]))
    core.add_request(request("b", [5, 6, 7]))
    assert core.stats().extra["waiting_deferred"] == 2
    core.abort_requests(["a"])
    assert core.stats().extra["waiting_deferred"] == 1
    core.abort_requests(["b"])
    assert not core.has_work()
    assert core.stats().extra["waiting_deferred"] == 0
    assert core.stats().num_waiting == 0
