"""The connector under the real scheduler, against the oracle that knows no cache (B33, B36-B38,
B42)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from offload_engine import BLOCK, OffloadEngine, config_for, scheduler_sizes

from jaxengine.offload.config import OffloadPolicy
from jaxengine.offload.connector import JOB_BLOCKS, STEP_LOAD_BLOCKS
from jaxengine.offload.jobs import Done, Job


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(61) for _ in range(count)]


def engine_with(num_blocks: int = 40, slots: int = 200, **more: Any) -> OffloadEngine:
    sched_sizes = scheduler_sizes(num_blocks)
    names = ("delay", "fails", "depth")
    outer = {name: more.pop(name) for name in names if name in more}
    return OffloadEngine(sched_sizes, config_for(slots, sched_sizes, **more), **outer)


def test_a_prompt_comes_back_whole() -> None:
    """B42: local + external + computed is the prompt, and all full blocks are there."""
    engine = engine_with()
    prompt = tokens_of(random.Random(1), 10 * BLOCK + 3)
    engine.ask("a", prompt, 3)
    assert engine.count("host_blocks") == 11  # 43 + 2 tokens have KV
    engine.forget_device()
    engine.ask("b", prompt, 3)
    assert engine.seen["a"] == engine.seen["b"]
    assert engine.requests["b"].num_cached_tokens == 10 * BLOCK
    assert engine.count("external_hits") == 10 * BLOCK
    engine.check_outputs()


def test_a_prompt_of_whole_blocks_leaves_its_last_token() -> None:
    engine = engine_with()
    prompt = tokens_of(random.Random(2), 6 * BLOCK)
    engine.ask("a", prompt, 2)
    engine.forget_device()
    engine.ask("b", prompt, 2)
    assert engine.requests["b"].num_cached_tokens == 5 * BLOCK
    engine.check_outputs()


def test_device_and_host_share_a_prompt() -> None:
    """B42: the part on the device is not counted again as external."""
    engine = engine_with()
    prompt = tokens_of(random.Random(3), 12 * BLOCK + 1)
    engine.ask("a", prompt, 1)
    engine.forget_device()
    engine.ask("b", prompt[: 5 * BLOCK + 1], 1)
    hits = engine.count("external_hits")
    engine.ask("c", prompt, 1)
    assert hits == 5 * BLOCK
    assert engine.count("external_hits") - hits == 7 * BLOCK
    assert engine.requests["c"].num_cached_tokens == 12 * BLOCK
    engine.check_outputs()


def test_prompt_only_leaves_outputs() -> None:
    engine = engine_with(offload_prompt_only=True)
    engine.ask("a", tokens_of(random.Random(4), 3 * BLOCK), 20)
    assert engine.count("host_blocks") == 3


def test_request_level_stores_at_the_end() -> None:
    engine = engine_with(policy=OffloadPolicy.REQUEST_LEVEL)
    engine.add("a", tokens_of(random.Random(5), 4 * BLOCK), 12)
    for _ in range(6):
        engine.step()
    assert engine.count("host_blocks") == 0
    engine.run()
    assert engine.count("host_blocks") == 6


def test_two_requests_wait_for_one_load() -> None:
    """The second finds the blocks on the device when the first one's load is done."""
    engine = engine_with(delay=6)
    prompt = tokens_of(random.Random(6), 8 * BLOCK + 2)
    engine.ask("a", prompt, 2)
    engine.forget_device()
    engine.add("b", prompt, 2)
    engine.add("c", prompt, 2)
    engine.run()
    assert engine.count("load_jobs") == 1
    assert [engine.requests[n].num_cached_tokens for n in "bc"] == [8 * BLOCK] * 2
    engine.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_failed_loads_are_computed(depth: int) -> None:
    """B38: two prompts share the failing blocks; nobody decodes from garbage, nothing stays."""
    broken = [True]

    def fails(job: Job) -> bool:
        return broken[0] and job.kind == "load"

    engine = engine_with(depth=depth, fails=fails)
    rng = random.Random(7)
    prompts = [tokens_of(rng, 7 * BLOCK + 1) for _ in range(3)]
    for i, prompt in enumerate(prompts):
        engine.ask(f"fill {i}", prompt, 4)
    engine.forget_device()
    for i, prompt in enumerate([*prompts, prompts[0]]):
        engine.add(f"broken {i}", prompt, 4)
    engine.run()
    assert engine.count("load_failures") == 3
    broken[0] = False
    engine.forget_device()
    for i, prompt in enumerate(prompts):
        engine.ask(f"healthy {i}", prompt, 4)
    assert engine.count("external_hits") == 3 * 7 * BLOCK
    engine.check_outputs()


def test_the_fail_policy_ends_only_the_affected() -> None:
    engine = engine_with(load_failure_policy="fail", fails=lambda job: job.kind == "load")
    rng = random.Random(8)
    known, other = tokens_of(rng, 6 * BLOCK + 1), tokens_of(rng, 6 * BLOCK + 1)
    engine.ask("fill", known, 2)
    engine.forget_device()
    engine.add("hit", known, 2)
    engine.add("miss", other, 2)
    engine.run()
    assert engine.reasons["hit"] == "error" and engine.reasons["miss"] == "length"
    assert engine.seen["hit"] == []
    engine.check_outputs()


def test_aborts_with_transfers_in_flight() -> None:
    """B36: at every moment of a load and of a store; blocks and slots all come back."""
    prompt = tokens_of(random.Random(9), 9 * BLOCK + 1)
    for moment in range(14):
        engine = engine_with(delay=5)
        engine.ask("fill", prompt, 3)
        engine.forget_device()
        engine.add("gone", prompt, 6)
        engine.add("canary", tokens_of(random.Random(10), 15), 6)
        for _ in range(moment):
            engine.step()
        engine.abort(["gone"])
        engine.run()
        engine.ask("again", prompt, 3)
        engine.check_outputs()


def test_late_and_unknown_completions_are_ignored() -> None:
    engine = engine_with()
    engine.connector.on_transfers([Done(12345, True), Done(99, False, "late")])
    assert engine.count("stale_transfers") == 2


def test_a_fault_loses_what_was_in_flight_only() -> None:
    engine = engine_with(delay=4)
    prompt = tokens_of(random.Random(11), 9 * BLOCK + 1)
    engine.ask("fill", prompt, 3)
    engine.forget_device()
    engine.add("hit", prompt, 6)
    for _ in range(3):
        engine.step()
    engine.transfer.pending.clear()  # the device is reset first
    engine.fault(kv_lost=True)
    engine.run()
    engine.ask("again", prompt, 6)
    assert engine.requests["again"].num_cached_tokens == 9 * BLOCK
    engine.check_outputs()


def test_reset_forgets_host_memory() -> None:
    engine = engine_with(delay=50)
    engine.add("a", tokens_of(random.Random(12), 6 * BLOCK + 1), 2)
    while engine.scheduler.has_work() or engine.flight:
        engine.step()
    assert engine.connector.has_pending()  # stores are still under way
    assert engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.count("host_blocks") == 0
    engine.ask("b", engine.requests["a"].token_ids[: 6 * BLOCK + 1].tolist(), 2)
    assert engine.count("external_hits") == 0


def test_error_blocks_are_not_kept() -> None:
    """NaN in the logits may come from the KV: the request's blocks must not be found again."""
    engine = engine_with(delay=0)
    engine.add("a", tokens_of(random.Random(13), 8 * BLOCK), 8)
    for _ in range(4):
        engine.step()
    stored = engine.count("host_blocks")
    plan, result = engine.flight.popleft()
    result.bad_rows = np.ones(plan.num_rows, np.bool_)
    engine.flight.appendleft((plan, result))
    engine.reasons.clear()
    engine.run()
    assert stored > 0 and engine.count("host_blocks") == 0


CASES = [
    ((0,), 2, {}),
    ((0,), 1, {}),
    ((0,), 2, {"eviction_policy": "arc"}),
    ((0,), 2, {"policy": OffloadPolicy.REQUEST_LEVEL}),
    ((0, 10), 2, {}),
    ((10,), 1, {}),
    ((0,), 2, {"fs": True}),
    ((0, 7, 18), 2, {"fs": True}),
]


@pytest.mark.parametrize("windows, depth, options", CASES)
def test_random_conversations(
    windows: tuple[int, ...], depth: int, options: dict[str, Any], tmp_path: Any
) -> None:
    """B33, B37: a tiny device pool, turns interleaved, aborts, preemptions, drafts, failures."""
    options = dict(options)
    if options.pop("fs", False):
        options |= {"fs_path": str(tmp_path), "fs_bytes": 60_000}
    rng = random.Random(f"{windows} {depth} {sorted(options)}")
    sched_sizes = scheduler_sizes(34 * len(windows), windows, max_drafts=2, policy="priority")
    config = config_for(60, sched_sizes, **options)
    broken: set[int] = set()

    def fails(job: Job) -> bool:
        if rng.random() < 0.05:
            broken.add(job.job_id)
        return job.job_id in broken

    engine = OffloadEngine(sched_sizes, config, depth, delay=3, fails=fails)
    talks = [tokens_of(rng, rng.randrange(5, 30)) for _ in range(5)]
    turn = 0
    for _ in range(20):
        live: dict[int, str] = {}
        for i in rng.sample(range(5), rng.randrange(1, 5)):
            name, turn = f"turn {turn}", turn + 1
            live[i] = name
            engine.add(name, talks[i], rng.randrange(1, 12), priority=rng.randrange(3))
        for _ in range(rng.randrange(12)):
            engine.step()
            if rng.random() < 0.3 and engine.scheduler.state.running:
                request = rng.choice(engine.scheduler.state.running)
                engine.scheduler.set_drafts(request, [rng.randrange(61) for _ in range(2)])
        if rng.random() < 0.3:
            engine.abort([rng.choice(list(live.values()))])
        engine.run()
        for i, name in live.items():
            talks[i] = talks[i] + engine.seen[name] + tokens_of(rng, rng.randrange(1, 8))
            if len(talks[i]) > 70:
                talks[i] = tokens_of(rng, rng.randrange(5, 30))
    engine.check_outputs()
    assert engine.count("external_hits") > 0
    assert engine.count("load_errors") + engine.count("store_errors") > 0
    engine.offload.close()


def test_a_window_is_loaded_and_nothing_before_it_is_found() -> None:
    """Only the last window of a windowed group is loaded. The blocks before it hold nothing, so
    a shorter prompt must not hit them on the device."""
    sched_sizes = scheduler_sizes(80, (0, 7))
    engine = OffloadEngine(sched_sizes, config_for(200, sched_sizes))
    prompt = tokens_of(random.Random(14), 12 * BLOCK + 1)
    engine.ask("fill", prompt, 2)
    engine.forget_device()
    engine.ask("long", prompt, 2)
    assert engine.requests["long"].num_cached_tokens == 12 * BLOCK
    assert engine.count("host_hits") == 12 + 2  # all of the full group, 6 tokens of the window
    for blocks in (11, 9, 4):
        engine.ask(f"short {blocks}", prompt[: blocks * BLOCK + 1], 2)
    engine.check_outputs()


def test_a_step_loads_no_more_than_its_share() -> None:
    """Jobs of any size: at most STEP_LOAD_BLOCKS blocks a step, every job once, in order."""
    engine = engine_with()
    rng = random.Random(11)
    sizes = [rng.randint(1, JOB_BLOCKS) for _ in range(200)]
    jobs = [Job(i, "load", 0, [0] * n, [0] * n) for i, n in enumerate(sizes)]
    engine.connector._new_loads.extend(jobs)
    given: list[Job] = []
    while (step := engine.connector.take_step()) is not None:
        assert 0 < sum(len(job.slots) for job in step.loads) <= STEP_LOAD_BLOCKS
        given += step.loads
    assert given == jobs
    engine.offload.close()
