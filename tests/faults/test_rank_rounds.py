"""Random faults on random ranks of real models under load: nobody hangs, nobody is told an
untruth, and every rank comes back. (B44 with several ranks.)"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.front.async_llm import AsyncLLM, Placement, UnavailableError
from jaxengine.sampling_params import SamplingParams

LLAMA = GOLDENS / "llama"
TOKENS = 40
PROMPTS = 16
WARM = 15.0  # seconds
KILLS = ("worker", "hang", "engine")  # beside those that the ranks are told to have
TINY: dict[str, Any] = {
    "model": str(LLAMA),
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 96,
}
DEMO: dict[str, Any] = {
    "model": "demo",
    "dtype": "float32",  # batches of all sizes round alike
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64,
}


@dataclass
class Seen:
    """What the clients saw."""

    ends: Counter[str] = field(default_factory=Counter)
    last_tokens: dict[int, float] = field(default_factory=dict)  # by rank
    longest_stall: float = 0.0  # of the front, seconds
    longest_pause: float = 0.0  # of a rank that was healthy all the while, seconds


class Drill:
    """One engine group, its clients, and the one who breaks it."""

    def __init__(self, engine: AsyncLLM, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        vocab = engine.limits.vocab_size
        shared = [rng.randrange(3, vocab) for _ in range(20)]  # a prefix that is cached
        self.prompts = [
            shared + [rng.randrange(3, vocab) for _ in range(i % 7)] for i in range(PROMPTS)
        ]
        self.truth: list[list[int]] = []
        self.seen = Seen()
        self.stop = False
        self.faults = 0
        self.waits: list[float] = []  # seconds from a fault to the end of the rank's requests
        self.took: dict[str, float] = {}  # seconds of the longest recovery, by fault and order
        self.broken_at = dict.fromkeys(engine.board.ranks, 0.0)  # time of the last fault

    async def ask(
        self, number: int, rank: int | None, kind: str = "delta"
    ) -> tuple[list[int], str]:
        tokens: list[int] = []
        placement = Placement(rank)
        async for output in self.engine.generate(
            self.prompts[number], self.params, kind=kind, placement=placement
        ):
            tokens += output.outputs[0].token_ids
            if rank is not None:
                self._token(rank)
            reason = output.outputs[0].finish_reason
        return tokens, str(reason)

    async def whole(self, number: int, rank: int) -> list[int]:
        """The answer of a rank, asked again while planned faults are left."""
        while True:
            with contextlib.suppress(UnavailableError):
                tokens, reason = await self.ask(number, rank)
                if reason == "length":
                    return tokens
            await asyncio.sleep(0.1)

    def _token(self, rank: int) -> None:
        now = time.monotonic()
        before = self.seen.last_tokens.get(rank, now)
        self.seen.last_tokens[rank] = now
        # a rank that just came back still compiles
        warm = self.broken_at[rank] < before - WARM
        if warm and self.engine.board.ranks[rank].state == "healthy":
            self.seen.longest_pause = max(self.seen.longest_pause, now - before)

    async def client(self, number: int, rank: int | None) -> None:
        """Ask again and again; what comes is the truth, or the beginning of it."""
        while not self.stop:
            which = self.rng.randrange(len(self.prompts))
            try:
                tokens, reason = await self.ask(which, rank)
            except UnavailableError:
                self.seen.ends["503"] += 1
                await asyncio.sleep(0.2)
                continue
            if reason == "error":  # on its way while the rank failed
                assert not tokens
                self.seen.ends["503"] += 1
                continue
            assert tokens == self.truth[which][: len(tokens)], (number, reason)
            assert reason in ("length", "abort")
            assert reason == "abort" or len(tokens) == TOKENS
            self.seen.ends[reason] += 1

    def worker(self, rank: int) -> psutil.Process:
        pid = self.engine.engine_pids[rank]
        assert pid is not None
        return next(
            child
            for child in psutil.Process(pid).children()
            if "jaxengine::worker" in " ".join(child.cmdline())
        )

    def break_rank(self, rank: int, kind: str) -> None:
        if kind == "engine":
            pid = self.engine.engine_pids[rank]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        elif kind == "worker":
            self.worker(rank).kill()
        else:
            self.worker(rank).suspend()
        self.broken_at[rank] = time.monotonic()

    async def clock(self) -> None:
        """How long the front itself stood still."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.05)
            self.seen.longest_stall = max(self.seen.longest_stall, time.monotonic() - began)

    async def killer(self, gap: float) -> None:
        """Something happens to somebody, every `gap` seconds or so."""
        while not self.stop:
            await asyncio.sleep(gap * (0.5 + self.rng.random()))
            ranks, healthy = len(self.engine.board.ranks), self.engine.board.healthy()
            rank = self.rng.choice(list(self.engine.board.ranks))
            if rank in healthy and len(healthy) >= ranks - 1:
                with contextlib.suppress(StopIteration, psutil.Error):  # it is being replaced
                    self.break_rank(rank, self.rng.choice(KILLS))

    async def controller(self, rank: int) -> None:
        """Repair the rank whenever it fails, and see that it says what it said before."""
        board = self.engine.board
        while True:
            await asyncio.sleep(0.02)
            health = board.ranks[rank]
            if health.state == "healthy":
                continue
            began = self.broken_at[rank] = time.monotonic()
            kind = str(health.fault_info)
            await until(lambda: self._in_flight(rank) == 0, 5)
            self.waits.append(time.monotonic() - began)
            instruction = "respawn"
            if health.state == "unhealthy":
                instruction = self.rng.choice(["retry", "respawn"])
            began = time.monotonic()
            order = self.engine.orders.apply({"instruction": instruction, "params": {"rank": rank}})
            await until(lambda o=order: o.payload()["status"] == "done", 60)
            self.broken_at[rank] = time.monotonic()
            if not order.payload()["success"]:  # the worker went too, just before
                assert instruction == "retry", order.payload()
                continue
            took = f"{kind}, {instruction}"
            self.took[took] = max(self.took.get(took, 0.0), time.monotonic() - began)
            self.faults += 1

    def _in_flight(self, rank: int) -> int:
        return self.engine._group.placer.balancer.loads[rank].own


async def until(check: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)


def planned(rng: random.Random, ranks: int) -> str:
    """Faults that the ranks carry out themselves, after the undisturbed run."""
    kinds = ("raise", "oom", "exit")
    first = TOKENS * (PROMPTS // ranks + 2)
    return json.dumps(
        [
            {"rank": rank, "step": first + 300 * i + rng.randrange(300), "kind": kind}
            for rank in range(ranks)
            for i, kind in enumerate(rng.sample(kinds, 3))
        ]
    )


async def rounds(
    settings: dict[str, Any],
    ranks: int,
    clients: int,
    count: int,
    seed: int,
    step_timeout: float = 3.0,
    gap: float = 1.5,
) -> Seen:
    """So many faults under the load of so many clients. Half of the clients choose their rank."""
    rng = random.Random(seed)
    config = EngineConfig.of(
        **settings,
        data_parallel_size=ranks,
        enable_fault_tolerance=True,
        fault_tolerance_config={"step_timeout_sec": step_timeout},
        inject_faults=planned(rng, ranks),
    )
    engine = await AsyncLLM.start(config, skip_tokenizer_init=True)
    try:
        drill = Drill(engine, rng)
        for i in range(len(drill.prompts)):  # the undisturbed run, on every rank alike
            drill.truth.append((await drill.ask(i, i % ranks))[0])
        for rank in range(ranks):
            assert (await drill.ask(0, rank))[0] == drill.truth[0]
        drill.seen = Seen()
        load = [
            asyncio.create_task(drill.client(i, i % ranks if i % 2 else None))
            for i in range(clients)
        ]
        watch = [asyncio.create_task(drill.controller(rank)) for rank in range(ranks)]
        watch.append(asyncio.create_task(drill.clock()))
        kills = asyncio.create_task(drill.killer(gap))
        while drill.faults < count:
            await asyncio.sleep(0.1)
            for task in [*load, *watch, kills]:
                if task.done():
                    task.result()
        kills.cancel()
        drill.stop = True
        done, hanging = await asyncio.wait(load, timeout=60)
        assert not hanging
        for task in done:
            task.result()
        assert engine.num_requests == 0
        for rank in range(ranks):  # no poisoned prefix anywhere
            for i in range(len(drill.prompts)):
                assert await drill.whole(i, rank) == drill.truth[i]
        for task in watch:
            task.cancel()
        await engine.call("check_integrity")
        family = [psutil.Process(pid) for pid in engine.engine_pids.values() if pid]
        family += [child for p in family for child in p.children(recursive=True)]
    finally:
        await engine.shutdown()
    _, left = psutil.wait_procs(family, timeout=5)
    assert not left
    seen = drill.seen
    took = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in sorted(drill.took.items()))
    print(
        f"\n{drill.faults} faults, {ranks} ranks, {clients} clients: {dict(seen.ends)}; longest "
        f"wait for an end {max(drill.waits):.2f} s; longest pause of a healthy rank "
        f"{seen.longest_pause:.2f} s, of the front {seen.longest_stall:.2f} s; recoveries: {took}"
    )
    return seen


@pytest.mark.timeout(300)
async def test_a_round_of_chance(record_property: Any) -> None:
    """Other faults each time."""
    seed = random.SystemRandom().randrange(1 << 32)
    record_property("shown", f"random fault round: seed {seed}")
    seen = await rounds({**TINY, "warmup": "lazy"}, ranks=2, clients=4, count=1, seed=seed)
    assert sum(seen.ends.values()) >= 4


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_twenty_rounds_on_four_ranks() -> None:
    seen = await rounds(TINY, ranks=4, clients=32, count=20, seed=1)
    assert seen.ends["length"] > 50 and seen.ends["abort"] >= 20


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_ranks_of_the_demo_model() -> None:
    seen = await rounds(DEMO, ranks=2, clients=8, count=4, seed=2, step_timeout=15.0, gap=15.0)
    assert seen.ends["length"] > 4 and seen.ends["abort"] >= 4
