"""The small sampler of greedy steps, taken while the whole one is not compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
from engine_runs import engine, request, run

from jaxengine.engine.core import EngineCore
from jaxengine.runner.programs import Key

LAZY: dict[str, Any] = {
    "model": "llama",
    "warmup": "lazy",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 20,
}
PROMPTS = [[7, 8, 9, 10], [50 + i for i in range(23)]]


def samplers(core: EngineCore) -> set[Key]:
    programs = core.executor.runner.programs  # type: ignore[attr-defined]
    return {key for key in programs._futures if key.kind in ("sample", "greedy")}


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

    programs = core.executor.runner.programs  # type: ignore[attr-defined]
    compiled = programs.num_compiled
    ids_now, values_now = greedy()  # with the whole one
    assert ids_now == ids
    # The output head is part of both programs, and may be fused otherwise.
    np.testing.assert_allclose(values_now, values, rtol=1e-5)
    assert programs.num_compiled == compiled
