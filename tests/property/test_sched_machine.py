"""Any order of events: the scheduler's books stay right and no token changes."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from step_loop import Engine

from jaxengine.sched.config import GroupSpec, SchedulerSizes
from jaxengine.sched.scheduler import CapacityError

# The fake device finds the entry before in every group, so a window has two tokens at least.
WINDOWS = [(0,), (0,), (8,), (0, 6), (5, 0, 9), (2, 0)]


def make_prompt(family: int, length: int) -> list[int]:
    """Prompts of a family share a beginning; where they part depends on the length."""
    shared = min(length, 12)
    return [(family * 17 + i * i) % 59 for i in range(shared)] + [
        (length * 13 + family + i * 5) % 59 for i in range(length - shared)
    ]


def make_config(draw: random.Random) -> SchedulerSizes:
    chunked = draw.random() < 0.8
    max_len = draw.choice([24, 40, 64])
    return SchedulerSizes(
        max_num_seqs=draw.choice([1, 2, 4, 6]),
        max_num_batched_tokens=draw.choice([3, 8, 16, 64]) if chunked else max_len,
        max_model_len=max_len,
        block_size=draw.choice([1, 2, 4]),
        num_blocks=draw.choice([6, 9, 16, 40]),
        groups=tuple(GroupSpec(w) for w in draw.choice(WINDOWS)),
        enable_prefix_caching=draw.random() < 0.8,
        prefix_caching_hash_algo=draw.choice(["sha256", "xxhash"]),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw.choice([0, 0, 2, 5]) if chunked else 0,
        policy=draw.choice(["fcfs", "priority"]),
        reserve_full_prompt=draw.random() < 0.7,
        watermark=draw.choice([0.0, 0.0, 0.2]),
    )


def add_random(engine: Engine, draw: random.Random) -> None:
    name = f"r{len(engine.requests)}"
    length = draw.randint(1, 30)
    try:
        engine.add(
            name,
            make_prompt(draw.randint(0, 2), length),
            draw.choice([0, 1, 2, 5, 20, 40]),
            stop_token_ids=tuple(draw.sample(range(61), 2)) if draw.random() < 0.4 else (),
            eos_token_ids=(3,) if draw.random() < 0.4 else (),
            priority=draw.randint(0, 2),
            arrival_time=float(len(engine.requests)),
            cache_salt=draw.choice([None, None, "a"]),
            skip_reading_prefix_cache=draw.random() < 0.1,
        )
    except CapacityError:
        assert name not in engine.requests


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(draw=st.randoms(use_true_random=False), depth=st.sampled_from([1, 2, 3]))
    def begin(self, draw: random.Random, depth: int) -> None:
        self.engine = Engine(make_config(draw), depth)
        self.paused = False

    @rule(draw=st.randoms(use_true_random=False), count=st.integers(1, 3))
    def add(self, draw: random.Random, count: int) -> None:
        for _ in range(count):
            add_random(self.engine, draw)

    @rule()
    def submit(self) -> None:
        self.engine.submit()

    @rule()
    def take(self) -> None:
        self.engine.take()

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(which=st.sets(st.integers(0, 30), max_size=3))
    def abort(self, which: set[int]) -> None:
        self.engine.abort([f"r{i}" for i in which])

    @rule(kv_lost=st.booleans())
    def fault(self, kv_lost: bool) -> None:
        self.engine.fault(kv_lost)

    @rule(reset_running=st.booleans())
    def reset(self, reset_running: bool) -> None:
        done = self.engine.scheduler.reset_prefix_cache(reset_running)
        assert done or not reset_running
        self.engine.scheduler.check_integrity()

    @precondition(lambda self: not self.paused)
    @rule(mode=st.sampled_from(["abort", "wait", "keep"]))
    def pause(self, mode: str) -> None:
        for request in self.engine.scheduler.pause(mode):
            self.engine.reasons[request.request_id] = "abort"
        self.paused = True

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        self.engine.scheduler.resume()
        self.paused = False

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.scheduler.resume()
        self.engine.run()
        assert set(self.engine.reasons) == set(self.engine.requests), "a request never ended"
        self.engine.check_outputs()


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase


def random_run(seed: int, steps: int) -> tuple[int, int]:
    """One engine, `steps` random events, then drained. Returns (preemptions, hit tokens)."""
    draw = random.Random(seed)
    engine = Engine(make_config(draw), draw.choice([1, 2, 2, 3]))
    for _ in range(steps):
        dice = draw.random()
        if dice < 0.12 and engine.scheduler.num_waiting < 8:
            add_random(engine, draw)
        elif dice < 0.14 and engine.requests:
            engine.abort(draw.sample(sorted(engine.requests), 1))
        elif dice < 0.15:
            engine.fault(draw.random() < 0.5)
        elif dice < 0.16:
            engine.scheduler.reset_prefix_cache(draw.random() < 0.5)
        elif draw.random() < 0.6:
            engine.submit()
        else:
            engine.take()
    engine.run()
    assert set(engine.reasons) == set(engine.requests)
    engine.check_outputs()
    return engine.scheduler.num_preemptions, engine.scheduler.prefix_hits


def test_twenty_thousand_random_events() -> None:
    preemptions, hits = zip(*(random_run(seed, 250) for seed in range(80)), strict=True)
    assert sum(preemptions) > 100 and sum(hits) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_long_random_runs(seed: int) -> None:
    random_run(1000 + seed, 10_000)
