"""Several ranks in threads, over real sockets: whatever work comes when, all make the same steps,
nobody waits for ever, and all sleep in the end."""

from __future__ import annotations

import queue
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine.config import EngineConfig
from jaxengine.engine.absent import Alone
from jaxengine.engine.coupled import waves
from jaxengine.engine.coupled.lockstep import Lockstep, _sizes
from jaxengine.executor.coupling import Interrupted, free_port
from jaxengine.sampling_params import SamplingParams
from jaxengine.sched.batch import Bucket
from jaxengine.sched.buckets import Overlap, all_buckets
from jaxengine.sched.shapes import StepShapes
from jaxengine.settings.coupling import member_config, member_of
from jaxengine.wire.frames import WaveNotice


class FakeWorker:
    """Compiles a program in no time; dies when told to."""

    def __init__(self, overlap: Overlap | None) -> None:
        buckets = all_buckets(4, 64)
        self.facts = SimpleNamespace(step_shapes=StepShapes(buckets, (1, 2, 4), overlap))
        self.ready_programs: frozenset[Any] = frozenset()
        self.warm = True
        self.death: Exception | None = None

    def compile(self, key: Any) -> None:
        self.ready_programs |= {key}

    def check(self) -> None:
        if self.death is not None:
            raise self.death


class FakePlan:
    """Of decode rows only."""

    def __init__(self, rows: int) -> None:
        self.num_tokens = self.num_rows = self.num_decode = rows
        self.new_requests: list[Any] = []
        self.requests: list[Any] = [None] * rows


class Rank(threading.Thread):
    """A loop as the engine process has it. A request is a number of steps."""

    def __init__(self, rank: int, size: int, port: int, overlap: Overlap | None = None) -> None:
        super().__init__(daemon=True)
        flat = {"data_parallel_size": size, "enable_expert_parallel": True}
        config = member_config(EngineConfig.of(**flat), rank, port)
        member = member_of(config)
        assert member is not None
        self.worker = FakeWorker(overlap)
        self.lockstep = Lockstep(member, config, self.worker)  # type: ignore[arg-type]
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.running: list[int] = []
        self.steps: list[tuple[Bucket, int]] = []
        self.done = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while self.turn():
                pass
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def turn(self) -> bool:
        while True:
            busy = bool(self.running) or self.lockstep.running
            try:
                message = self.inbox.get(block=not busy)
            except queue.Empty:
                break
            if message is None:
                return False
            if isinstance(message, WaveNotice):
                self.lockstep.start_wave(message)
            else:
                self.running.append(message)
        if not self.lockstep.takes_part(bool(self.running)):
            return True
        plan: Any = FakePlan(min(4, len(self.running))) if self.running else None
        try:
            agreed = self.lockstep.agree([plan], bool(self.running))
        except Interrupted:
            return True
        if agreed.shape is None:
            return True
        self.steps.append(agreed.shape)
        ended = [steps for steps in self.running if steps == 1]
        self.done += len(ended)
        self.running = [steps - 1 for steps in self.running if steps > 1]
        return True


class Front:
    """Passes notices of waves on, late."""

    def __init__(self, ranks: list[Rank], rng: random.Random) -> None:
        self.ranks, self.rng = ranks, rng
        self.state = waves.Coordinator()
        self.lock = threading.Lock()
        for rank, one in enumerate(ranks):
            one.lockstep.bind(lambda notice, rank=rank: self.hear(rank, notice))  # type: ignore[misc]

    def hear(self, rank: int, notice: WaveNotice) -> None:
        with self.lock:
            if not notice.running:
                self.state = waves.wave_complete(self.state, notice.wave)
                return
            self.state, start = waves.wave_started(self.state, notice.wave, rank)
            if start is not None:
                for other, one in enumerate(self.ranks):
                    if other != start.exclude:
                        late = threading.Timer(
                            self.rng.random() * 0.01,
                            one.inbox.put,
                            [WaveNotice(notice.port, start.wave)],
                        )
                        late.start()


# -- what a rank asks for ---------------------------------------------------------------------


class Chosen(Exception):
    """A lone engine chose the shape of these sizes."""


def made(num_decode: int, *prompts: tuple[int, dict[str, Any]]) -> Any:
    """A plan of decode rows and of prompts: (tokens, what is asked of them)."""
    plan = FakePlan(num_decode)
    plan.num_rows += len(prompts)
    plan.num_tokens += sum(tokens for tokens, _ in prompts)
    for _, asked in prompts:
        params = SamplingParams(prompt_logprobs=asked.get("prompt_logprobs"))
        wire = SimpleNamespace(params=params, pooling=asked.get("pooling"))
        prepared = SimpleNamespace(wire=wire, needs_slot_record=False)
        plan.requests.append(SimpleNamespace(params=prepared))
    return plan


PLAIN: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("plans", "decode_only"),
    [
        ([made(3)], True),
        ([made(2, (1, PLAIN))], True),  # all but one token of the prompt was cached
        ([made(0, (1, PLAIN), (1, PLAIN))], True),
        ([made(2, (1, PLAIN)), None], True),
        ([made(3), made(0, (1, PLAIN))], True),
        ([made(2, (2, PLAIN))], False),
        ([made(3), made(1, (9, PLAIN))], False),
        ([made(2, (1, {"prompt_logprobs": 1}))], False),  # of the prompt's hidden states
        ([made(2, (1, {"pooling": "mean"}))], False),
    ],
)
def test_a_coupled_rank_asks_for_the_program_that_a_lone_engine_takes(
    plans: list[Any], decode_only: bool
) -> None:
    def choose(*sizes: Any) -> Any:
        raise Chosen(sizes)

    executor: Any = SimpleNamespace(choose=choose)
    with pytest.raises(Chosen) as alone:
        Alone(executor).shape(plans, True)
    wished = _sizes(plans)
    assert wished is not None and wished.decode_only == decode_only
    sizes = (wished.num_tokens, wished.num_rows, wished.decode_only, wished.fewest_tokens)
    assert alone.value.args == (sizes,)


def test_every_rank_counts_the_overlap_of_the_steps_that_all_make() -> None:
    ranks = group(2, overlap=Overlap(2, 2))
    for one in ranks:
        one.inbox.put(3)
        one.inbox.put(3)
    for one in ranks:
        one.start()
    until(lambda: sum(one.done for one in ranks) == 4)
    until(lambda: not any(one.lockstep.running for one in ranks))
    stats = [one.lockstep.stats() for one in ranks]
    assert stats[0] == stats[1]
    split = sum(bucket.dbo for bucket, _ in ranks[0].steps)
    assert stats[0]["dbo_steps"] == split > 0
    counted = sum(n for name, n in stats[0].items() if name.startswith("dbo_"))
    assert counted == len(ranks[0].steps)
    stop(ranks)


# -- groups -----------------------------------------------------------------------------------


def group(size: int, seed: int = 0, overlap: Overlap | None = None) -> list[Rank]:
    port = free_port()
    ranks = [Rank(rank, size, port, overlap) for rank in range(size)]
    Front(ranks, random.Random(seed))
    return ranks


def stop(ranks: list[Rank]) -> None:
    for one in ranks:
        one.inbox.put(None)
        one.lockstep.stop_waiting()
    for one in ranks:
        one.join(5)
        assert not one.is_alive()
        one.lockstep.close()


def until(check: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_all_make_the_same_steps(seed: int) -> None:
    rng = random.Random(seed)
    ranks = group(2 + seed % 2, seed)
    for one in ranks:
        one.start()
    sent = 0
    for _ in range(25):
        for _ in range(rng.choice([1, 1, 2, 5])):
            rng.choice(ranks).inbox.put(rng.choice([1, 2, 3, 20]))
            sent += 1
        # often just when a wave ends
        time.sleep(rng.choice([0, 0, 0.001, 0.003, 0.02]))
    until(lambda: sum(one.done for one in ranks) == sent)
    until(lambda: not any(one.lockstep.running for one in ranks))
    steps = [one.steps for one in ranks]
    assert all(s == steps[0] for s in steps) and steps[0]
    assert len({one.lockstep.num_waves for one in ranks}) == 1
    assert {one.error for one in ranks} == {None}
    # none of them steps while all sleep
    time.sleep(0.05)
    assert [len(one.steps) for one in ranks] == [len(s) for s in steps]
    stop(ranks)


def test_a_death_while_waiting_for_the_others_is_noticed() -> None:
    ranks = group(2)
    ranks[1].start()
    ranks[1].inbox.put(3)  # rank 0 never comes
    time.sleep(0.1)
    assert ranks[1].is_alive()
    ranks[1].worker.death = RuntimeError("gone")
    ranks[1].join(2)
    assert not ranks[1].is_alive() and str(ranks[1].error) == "gone"
    stop(ranks[1:])
    ranks[0].lockstep.close()


def test_a_new_group_begins_at_the_beginning() -> None:
    ranks = group(2)
    for one in ranks:
        one.start()
    ranks[0].inbox.put(5)
    until(lambda: ranks[0].done == 1 and not any(one.lockstep.running for one in ranks))
    old = ranks[0].lockstep.port
    stop(ranks)
    port = free_port()
    again = [Rank(rank, 2, old) for rank in range(2)]
    for one in again:
        one.lockstep.renew(port)
        one.lockstep.start_wave(WaveNotice(old, 7))  # news of the old one
        assert not one.lockstep.running
    Front(again, random.Random(0))
    for one in again:
        one.start()
    again[1].inbox.put(2)
    until(lambda: again[1].done == 1)
    assert again[0].lockstep.num_dummies == 2
    stop(again)
