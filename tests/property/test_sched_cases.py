"""Field faults of the scheduler, against a device whose output depends on all KV it reads."""

from __future__ import annotations

import planning
import pytest
from fake_device import oracle
from step_loop import Engine

from jaxengine.sched.config import GroupSpec, SchedulerSizes
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import CapacityError, Scheduler

LARGER = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "block_size": 16,
    "num_blocks": 1000,
}


def config(**changes: object) -> SchedulerSizes:
    return planning.config(**(LARGER | changes))


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * i * 7 + i) % 59 for i in range(length)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("reset", [False, True])
def test_b01_preemption_with_output_in_flight(depth: int, reset: bool) -> None:
    engine = Engine(config(num_blocks=12, max_num_batched_tokens=32), depth)
    prompts = {f"r{i}": prompt(i, 20) for i in range(8)} | {"long": prompt(99, 100)}
    for name in list(prompts)[:8]:
        engine.add(name, prompts[name], 64)
    for i in range(400):
        engine.step()
        if i == 10:
            engine.add("long", prompts["long"], 64)
        if reset and i % 37 == 5:
            assert engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for name, tokens in prompts.items():
        assert engine.seen[name] == oracle(tokens, 64, [0], set()), name
        assert engine.reasons[name] == "length"


@pytest.mark.parametrize("depth", [1, 2])
def test_b02_request_that_can_never_fit(depth: int) -> None:
    engine = Engine(config(num_blocks=10), depth)
    with pytest.raises(CapacityError, match="200 tokens.*10 blocks of 16 tokens.*at most 160"):
        engine.add("a", prompt(1, 200), 8)
    with pytest.raises(CapacityError, match="max_model_len 512 leaves room for 511"):
        engine.add("a", prompt(1, 512), 8)
    engine.add("short", prompt(2, 5), 4)
    engine.add("b", prompt(3, 160), 1)
    engine.add("c", prompt(4, 152), 200)
    engine.run()
    assert engine.seen["short"] == oracle(prompt(2, 5), 4, [0], set())
    assert engine.seen["b"] == oracle(prompt(3, 160), 1, [0], set())
    # 160 tokens fit, and the last one sampled needs no KV.
    assert engine.seen["c"] == oracle(prompt(4, 152), 9, [0], set())
    assert engine.reasons == {"short": "length", "b": "length", "c": "length"}


def test_b02_watermark_does_not_keep_the_only_request_out() -> None:
    engine = Engine(config(num_blocks=10, watermark=0.3), 2)
    engine.add("b", prompt(3, 160), 1)
    engine.run()
    assert len(engine.seen["b"]) == 1


@pytest.mark.parametrize("budget", [24, 256, 2048])
def test_b24_shared_prefix_at_the_same_instant(budget: int) -> None:
    shared = prompt(5, 8 * 16)
    engine = Engine(config(max_num_batched_tokens=budget, max_num_seqs=32), 2)
    for round_ in range(5):
        prompts = {f"{round_}-{i}": shared + prompt(i + 100, 3 + i) for i in range(32)}
        for name, tokens in prompts.items():
            engine.add(name, tokens, 6)
        engine.step()
        first = next(iter(prompts))
        engine.scheduler.abort([first])
        engine.run()
        for name, tokens in list(prompts.items())[1:]:
            assert engine.seen[name] == oracle(tokens, 6, [0], set()), name
        assert engine.scheduler.reset_prefix_cache()
    if budget < 2048:
        assert engine.scheduler.prefix_hits > 0


def test_b24_a_step_does_not_hit_its_own_blocks() -> None:
    scheduler = Scheduler(config())
    tokens = prompt(1, 64)
    for name in "ab":
        scheduler.add(Request(name, tokens, max_tokens=2))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_new.tolist() == [64, 64]
    scheduler.add(Request("c", tokens, max_tokens=2))
    later = scheduler.schedule()
    assert later is not None
    assert later.requests[-1].num_cached_tokens == 48  # in device order it is safe


@pytest.mark.parametrize("budget", [16, 17, 32, 100, 250, 500, 501, 512])
@pytest.mark.parametrize("depth", [1, 2])
def test_b54_chunks_emit_nothing_and_change_nothing(budget: int, depth: int) -> None:
    engine = Engine(config(max_num_batched_tokens=budget, max_model_len=600), depth)
    tokens = prompt(7, 501)
    engine.add("beside", prompt(8, 5), 40)
    engine.add("long", tokens, 7)
    engine.add("long2", tokens[:-1], 7)
    engine.run()
    assert engine.seen["long"] == oracle(tokens, 7, [0], set())
    assert engine.seen["long2"] == oracle(tokens[:-1], 7, [0], set())
    assert engine.seen["beside"] == oracle(prompt(8, 5), 40, [0], set())


@pytest.mark.parametrize("budget", [4, 16, 40])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(0, 8), (8,), (0, 8, 5), (2, 0)])
def test_b72_windows_and_prefix_cache(budget: int, depth: int, windows: tuple[int, ...]) -> None:
    groups = tuple(GroupSpec(w) for w in windows)
    engine = Engine(
        config(block_size=4, num_blocks=120, max_num_batched_tokens=budget, groups=groups), depth
    )
    first = prompt(1, 40)
    prompts = {"a": first, "b": first[:30] + prompt(2, 10), "c": first, "d": first[:22]}
    for name, tokens in prompts.items():
        engine.add(name, tokens, 40)
        engine.run()
    for name, tokens in prompts.items():
        assert engine.seen[name] == oracle(tokens, 40, list(windows), set()), name
    assert engine.scheduler.prefix_hits > 0


def test_windowed_request_larger_than_the_pool_runs_in_small_chunks() -> None:
    cfg = config(block_size=4, num_blocks=6, max_num_batched_tokens=64, groups=(GroupSpec(8),))
    engine = Engine(cfg, 2)
    engine.add("a", prompt(1, 200), 50)
    engine.run()
    assert engine.seen["a"] == oracle(prompt(1, 200), 50, [8], set())


def test_max_tokens_zero_runs_the_prompt_and_gives_nothing() -> None:
    engine = Engine(config(max_num_batched_tokens=16), 2)
    engine.add("a", prompt(1, 40), 0)
    engine.run()
    assert engine.seen["a"] == [] and engine.reasons["a"] == "length"


@pytest.mark.parametrize("depth", [1, 2])
def test_context_limit_ends_with_length(depth: int) -> None:
    engine = Engine(config(max_model_len=50), depth)
    engine.add("a", prompt(1, 49), 30)
    engine.add("b", prompt(2, 30), 30)
    engine.run()
    assert engine.seen["a"] == oracle(prompt(1, 49), 1, [0], set())
    assert engine.seen["b"] == oracle(prompt(2, 30), 20, [0], set())
    assert set(engine.reasons.values()) == {"length"}


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_drafts_change_nothing_but_the_number_of_steps(wrong: int) -> None:
    """Synchronous drafts: right ones, and `wrong` percent of thirds spoilt."""
    engine = Engine(config(max_drafts=3), 1)
    want = {f"r{i}": oracle(prompt(i, 20 + i), 40, [0], set()) for i in range(4)}
    requests = [engine.add(f"r{i}", prompt(i, 20 + i), 40) for i in range(4)]
    while engine.scheduler.has_work():
        for request in requests:
            done = len(engine.seen[request.request_id])
            drafts = want[request.request_id][done : done + 3]
            if wrong and done % wrong == 0:
                drafts = [(t + 1) % 60 for t in drafts]
            engine.scheduler.set_drafts(request, drafts)
        engine.step()
    assert engine.seen == want
    assert (engine.steps < 20) == (wrong in (0, 3))


@pytest.mark.parametrize("kv_lost", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5, 9, 14])
def test_a_fault_leaves_no_poisoned_prefix(kv_lost: bool, steps: int) -> None:
    engine = Engine(config(block_size=2, max_num_batched_tokens=16), 2)
    tokens = prompt(1, 40)
    engine.add("before", tokens, 30)
    for _ in range(steps):
        engine.step()
    engine.submit()
    engine.fault(kv_lost)
    assert engine.reasons == {"before": "abort"}
    again = tokens + oracle(tokens, 30, [0], set())
    engine.add("after", again, 5)
    engine.run()
    assert engine.seen["after"] == oracle(again, 5, [0], set())
