"""A thinking budget in the engine: the end of the thought is forced, and all else is as before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from engine_runs import (
    TIGHT_16,
    alone,
    depth,
    engine,
    ids_of,
    oracle_engine,
    prompt_of,
    recorded_plans,
    request,
    run,
)
from msgspec.structs import replace

from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import ThinkingBudget
from jaxengine.wire.messages import EngineRequest

END = [301, 302]


class Numbers:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(f"<{i}>" for i in ids)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    made = engine(**TIGHT_16)
    monkeypatch.setattr(made._parts.grammars, "_tokenizer", Numbers())
    return made


def thinking(wire: EngineRequest, tokens: int) -> EngineRequest:
    budget = ThinkingBudget(tokens, True, [300], END, "<300>", "<301><302>")
    return replace(wire, thinking=budget)


def expected(wire: EngineRequest, tokens: int) -> list[int]:
    """What the oracle says when it is told to end its thought."""
    oracle, name = oracle_engine(), wire.request_id
    thought = ids_of(alone(oracle, [wire]))[name]
    most = len(thought)
    if "<301><302>" in Numbers().decode(thought[:tokens], False) or most <= tokens:
        return thought
    start = [*thought[:tokens], *END][:most]
    if len(start) == most:
        return start
    rest = replace(
        wire,
        prompt_token_ids=[*wire.prompt_token_ids, *start],
        params=replace(wire.params, max_tokens=most - len(start)),
    )
    return start + ids_of(alone(oracle, [rest]))[name]


@pytest.mark.parametrize("steps", [1, 2])
def test_the_end_is_forced_and_the_answer_goes_on(core: EngineCore, steps: int) -> None:
    """Beside others, with preemptions; steps before the limit have no masks."""
    rng = random.Random(5)
    requests = [request(f"{i}", prompt_of(rng, 20 + i), max_tokens=40) for i in range(8)]
    budgets = {"0": 0, "2": 7, "3": 38, "4": 39, "5": 60, "6": 20}
    want = {r.request_id: expected(r, budgets.get(r.request_id, 99)) for r in requests}
    wires = [thinking(r, budgets[r.request_id]) if r.request_id in budgets else r for r in requests]
    before = core.stats().num_preemptions
    with depth(core, steps):
        assert ids_of(run(core, wires)) == want
    assert core.stats().num_preemptions > before
    assert want["2"][7:9] == END and want["3"][38:] == END and want["4"][39] == END[0]


def test_masks_are_made_near_the_limit_only(core: EngineCore) -> None:
    """And not any more once the thought is over: far from it, a step waits for nothing."""
    wire = thinking(request("one", prompt_of(random.Random(6), 10), max_tokens=40), 20)
    with recorded_plans(core) as plans:
        run(core, [wire])
    masked = [i for i, plan in enumerate(plans) if plan.has_grammar]
    # the two forced tokens, and what was planned before the second one was known
    assert masked[0] == 20 and 2 <= len(masked) <= 4 and len(plans) >= 40
