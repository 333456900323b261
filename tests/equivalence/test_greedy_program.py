"""Programs that bring a first answer sooner: the small sampler of greedy steps, taken while the
whole one is not compiled, and prompts that run token by token in the decode program."""

from __future__ import annotations

from typing import Any

import numpy as np
from engine_runs import engine, oracle_engine, request, run

from jaxengine.engine.core import EngineCore
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.programs import Key, Programs

LAZY: dict[str, Any] = {
    "model": "llama",
    "warmup": "lazy",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 20,
}
PROMPTS = [[7, 8, 9, 10], [50 + i for i in range(23)]]


def programs_of(core: EngineCore) -> Programs:
    assert isinstance(core.executor, ModelRunner)
    return core.executor.programs


def samplers(core: EngineCore) -> set[Key]:
    return {key for key in programs_of(core)._futures if key.kind in ("sample", "greedy")}


def test_greedy_steps_do_not_wait_for_the_whole_sampler() -> None:
    core = engine(**LAZY)
    assert not samplers(core)

    def greedy() -> tuple[list[list[int]], np.ndarray]:
        core.scheduler.reset_prefix_cache()
        seen = run(core, [request(str(i), p, logprobs=5) for i, p in enumerate(PROMPTS)])
        values = [entry.logprobs for one in seen.values() for entry in one.logprobs]
        return [one.ids for one in seen.values()], np.array(values)

    ids, values = greedy()
    assert {key.kind for key in samplers(core)} == {"greedy"}

    # A request that draws, edits or is penalised needs the whole sampler, and brings it.
    before = samplers(core)
    for params in ({"temperature": 1.0}, {"logit_bias": {5: 1.0}}, {"presence_penalty": 0.5}):
        run(core, [request("other", PROMPTS[0], **params)])
    assert {key.kind for key in samplers(core) - before} == {"sample"}
    run(core, [request(str(i), p, temperature=1.0) for i, p in enumerate(PROMPTS)])

    programs = programs_of(core)
    compiled = programs.num_compiled
    ids_now, values_now = greedy()  # with the whole one
    assert ids_now == ids
    # The output head is part of both programs, and may be fused otherwise.
    np.testing.assert_allclose(values_now, values, rtol=1e-5)
    assert programs.num_compiled == compiled


def test_a_prompt_goes_through_the_decode_program_token_by_token() -> None:
    settings = {**LAZY, "max_num_seqs": 1, "max_num_batched_tokens": 1}
    core = engine(**settings)
    requests = [request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    requests += [request("scored", PROMPTS[0], prompt_logprobs=3)]
    seen = run(core, requests[:2])
    programs = programs_of(core)
    assert {key.size.decode_only for key in programs._futures if key.kind == "forward"} == {True}
    assert [len(one.ids) for one in seen.values()] == [8, 8]
    oracle = run(oracle_engine(), requests)
    assert [one.ids for one in seen.values()] == [oracle["0"].ids, oracle["1"].ids]

    # Prompt log-probabilities need what only the other programs give.
    scored = run(core, requests[2:])["scored"]
    assert scored.ids == oracle["scored"].ids
    assert scored.prompt is not None and len(scored.prompt) == len(PROMPTS[0])
    assert any(not key.size.decode_only for key in programs._futures if key.kind == "forward")
