"""Sleep and wake: what a sleeping engine is asked must not end it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from engine_runs import ONE_ROW, engine, ids_of, prompt_of, request, run

from jaxengine.engine.core import EngineCore
from jaxengine.wire.messages import EngineOutput


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


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_it_wakes_by_parts(level: int, first: str) -> None:
    """Trainers fetch the weights back first, write new ones, and only then make room for KV."""
    core = engine(**ONE_ROW)
    prompt = prompt_of(random.Random(10), 20)
    want = ids_of(run(core, [request("before", prompt, max_tokens=6)]))["before"]
    core.utility("sleep", [level])
    core.add_request(request("queued", prompt, max_tokens=6))
    assert core.utility("wake_up", [[first]]) is False
    assert core.utility("is_sleeping", []) and not core.has_work()
    core.utility("resume", [])
    assert core.step() == [] and not core.has_work()
    with pytest.raises(ValueError, match="tags must be among weights, kv_cache, got 'all'"):
        core.utility("wake_up", [["all"]])
    assert core.utility("wake_up", [["weights", "kv_cache"]]) is True
    got = [t for outputs in steps(core) for output in outputs for t in output.new_token_ids]
    assert got == want
    core.scheduler.check_integrity()


def test_what_runs_goes_on_after_a_sleep_that_keeps_it() -> None:
    core = engine(**ONE_ROW)
    prompt = prompt_of(random.Random(11), 20)
    want = ids_of(run(core, [request("before", prompt, max_tokens=30)]))["before"]
    core.add_request(request("kept", prompt, max_tokens=30))
    got = [t for _ in range(8) for output in core.step() for t in output.new_token_ids]
    assert 0 < len(got) < 20
    core.utility("sleep", [1, "keep"])
    got += [t for output in core.step() for t in output.new_token_ids]
    assert not core.has_work() and len(got) < 30
    core.utility("wake_up", [])
    got += [t for outputs in steps(core) for output in outputs for t in output.new_token_ids]
    assert got == want
    core.scheduler.check_integrity()


def steps(core: EngineCore) -> Iterator[list[EngineOutput]]:
    while core.has_work():
        yield core.step()
