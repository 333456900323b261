"""Sleep and wake: what a sleeping engine is asked must not end it."""

from __future__ import annotations

import random

import pytest
from engine_runs import ONE_ROW, engine, ids_of, prompt_of, request, run


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_survives_resume_and_answers_after_waking(level: int) -> None:
    core = engine(**ONE_ROW)
    prompt = prompt_of(random.Random(9), 20)
    want = ids_of(run(core, [request("before", prompt, max_tokens=6)]))["before"]
    core.utility("sleep", [level])
    core.utility("resume", [])  # has no effect until the weights are back
    core.add_request(request("queued", prompt, max_tokens=6))
    assert core.utility("is_sleeping", []) and not core.has_work()
    assert core.step() == []
    core.utility("wake_up", [])
    got: list[int] = []
    while core.has_work():
        for output in core.step():
            got += output.new_token_ids
    assert got == want
    core.scheduler.check_integrity()
