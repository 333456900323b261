"""One real engine process, its worker, and every kind of failure: requests end, orders work, and
what comes after is what came before."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fault_engine import MODEL, EngineProcess

from jaxengine.wire import frames as wire
from jaxengine.wire.messages import UNAVAILABLE

LONG = 150  # tokens; at least as many steps
PROMPT = [11, 42, 7, 99, 180, 23, 55, 201, 8, 77, 140, 33, 64, 5, 190, 250, 31, 12, 90, 6]


@pytest.fixture
def start() -> Iterator[Callable[..., EngineProcess]]:
    engines: list[EngineProcess] = []

    def make(*args: Any, **kwargs: Any) -> EngineProcess:
        engines.append(EngineProcess(*args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def oracle(engine: EngineProcess) -> dict[int, list[int]]:
    """Ids of a few prompts, the first of them the golden's."""
    case = json.loads((MODEL / "golden.json").read_text())["cases"][0]
    ids = {0: engine.complete(case["prompt"], 6), 1: engine.complete(PROMPT, 6)}
    assert ids[0] == case["greedy"][:6]
    return ids


def load(engine: EngineProcess) -> list[str]:
    """One request that runs, with PROMPT in its own, and two that wait."""
    names = [engine.add(PROMPT, LONG), engine.add(PROMPT, 5), engine.add(PROMPT[3:], 5)]
    engine.wait(lambda: engine.outputs(names[0]), 60)
    return names


def assert_aborted(engine: EngineProcess, names: list[str]) -> None:
    for name in names:
        assert engine.end(name).finish_reason == "abort"


def test_every_fault_and_every_order(start: Callable[..., EngineProcess]) -> None:
    engine = start(
        [
            {"step": 60, "kind": "raise"},
            {"step": 140, "kind": "oom"},
            {"step": 2, "kind": "raise", "during": "reset"},
        ],
        step_timeout_sec=4.0,
        engine_recovery_timeout_sec=8.0,
    )
    engine.ready()
    before = oracle(engine)
    assert "healthy" in engine.order("retry").reason
    assert "unknown instruction" in engine.order("restart").reason

    # A step raises: the worker lives.
    assert_aborted(engine, load(engine))
    status = engine.wait_state("unhealthy")
    assert (status.fault_info, status.epoch) == ("InjectedFault", 0)
    began = time.monotonic()
    refused = engine.end(engine.add(PROMPT, 4))
    assert (refused.finish_reason, refused.stop_reason) == ("error", UNAVAILABLE)
    assert engine.call("is_paused").error == "the engine is unhealthy"
    assert time.monotonic() - began < 3.5  # not even a step's time-out
    assert engine.order("retry").success and engine.status.state == "healthy"
    assert oracle(engine) == before
    assert engine.call("check_integrity").error is None

    # Out of memory, with the KV written and the result lost; the first retry fails too.
    assert_aborted(engine, load(engine))
    assert engine.wait_state("unhealthy").fault_info == "MemoryError"
    failed = engine.order("retry")
    assert not failed.success and failed.reason == "retry failed: InjectedFault"
    assert engine.status.state == "unhealthy"
    assert engine.order("retry").success
    assert oracle(engine) == before

    # The worker is killed.
    names = load(engine)
    engine.worker.kill()
    assert_aborted(engine, names)
    assert engine.wait_state("dead").fault_info == "WorkerDied"
    assert "dead" in engine.order("retry").reason
    assert engine.order("respawn", 60).success
    assert (engine.status.state, engine.status.epoch) == ("healthy", 1)
    assert oracle(engine) == before
    assert engine.call("check_integrity").error is None

    # The worker hangs; nobody orders anything, and the engine ends of it.
    names = load(engine)
    os.kill(engine.worker.pid, signal.SIGSTOP)
    for name in names:
        assert engine.end(name, 4 + 5).finish_reason == "abort"
    assert engine.wait_state("dead").fault_info == "WorkerHung"
    [failure] = engine.wait(lambda: engine.all(wire.EngineFailure), 8 + 5)
    # Its step or its heartbeat is missed first, as it happened to fall.
    assert failure.message.startswith("WorkerHung") and "4 s" in failure.message
    engine.assert_gone()
    assert engine.process.exitcode == 1


def test_nothing_is_left_behind(start: Callable[..., EngineProcess]) -> None:
    engine = start()
    engine.ready()
    maps = open(f"/proc/{engine.process.pid}/maps").read()
    assert "jaxlib" not in maps  # the engine process holds no JAX
    assert "jaxlib" in open(f"/proc/{engine.worker.pid}/maps").read()
    engine.worker.kill()  # idle: it is noticed all the same
    assert engine.wait_state("dead").fault_info == "WorkerDied"
    engine.send(wire.SHUTDOWN, None)
    engine.assert_gone()
    assert engine.process.exitcode == 0

    other = start()
    other.wait(other.has_worker, 60)
    assert other.process.pid is not None
    os.kill(other.process.pid, signal.SIGSTOP)  # as one that stands still
    other.process.kill()  # while its worker loads
    other.assert_gone()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_rounds(start: Callable[..., EngineProcess], seed: int) -> None:
    """Ten faults of every kind in one life, repaired without an order."""
    rng = random.Random(seed)
    step, faults = 30, []
    kinds = ["raise", "oom", "kill", "exit", "slow", "hang", "raise", "oom", "kill", "exit"]
    for kind in rng.sample(kinds, len(kinds)):
        faults.append({"step": step, "kind": kind, "where": "worker"})
        step += rng.randrange(60, 140)
    engine = start(faults, step_timeout_sec=5.0, auto_recover="respawn")
    engine.ready()
    case = json.loads((MODEL / "golden.json").read_text())["cases"][0]
    aborted = 0
    while len(engine.all(wire.EngineFailure)) == 0:
        name = engine.add(case["prompt"], 20)
        end = engine.end(name, 120)
        ids = [token for output in engine.outputs(name) for token in output.new_token_ids]
        assert ids == case["greedy"][: len(ids)]
        if end.finish_reason == "length":
            assert len(ids) == 20
            if aborted >= 9:
                break
        else:
            aborted += end.finish_reason == "abort"
            engine.wait_state("healthy", 120)
    assert aborted == 9  # slow is no fault
    assert engine.call("check_integrity").error is None


@pytest.mark.slow
def test_faults_in_the_engine_process_itself(start: Callable[..., EngineProcess]) -> None:
    engine = start([{"step": 30, "kind": "raise", "where": "engine"}])
    engine.ready()
    before = engine.complete(PROMPT, 6)
    assert_aborted(engine, load(engine))
    assert engine.order("retry").success
    assert engine.complete(PROMPT, 6) == before
    assert engine.order("drain").success
    assert engine.end(engine.add(PROMPT, 4)).stop_reason == UNAVAILABLE
    assert engine.status.state == "draining"
