"""Requests that another thread ends while the engine waits for the device."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from engine_runs import TIGHT_16, alone, engine, ids_of, oracle_engine, prompt_of, request, run

from jaxengine.engine.core import EngineCore
from jaxengine.wire.messages import EngineStats


class Killer:
    """Ends requests, each from a thread of its own, while a step's result is waited for."""

    def __init__(self, core: EngineCore, at: dict[int, list[str]]) -> None:
        self._core, self._at = core, at
        self._result = core.executor.result
        self._waits = 0
        self.used: list[tuple[float, float]] = []  # share of the blocks, before and after

    def result(self, handle: Any) -> Any:
        self._waits += 1
        names = self._at.get(self._waits, [])
        if names:
            before = self._core.scheduler.kv_usage
            reports: list[EngineStats] = []
            thread = threading.Thread(target=self._core.abort_early, args=(names, reports.append))
            thread.start()
            thread.join(30)
            assert not thread.is_alive() and len(reports) == 1, "it waited for the step"
            self.used.append((before, self._core.scheduler.kv_usage))
        return self._result(handle)


def test_blocks_are_free_before_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever gets them next, while the step still writes there, is not disturbed."""
    core = engine(**TIGHT_16)
    rng = random.Random(7)
    requests = [request(f"{i}", prompt_of(rng, 20 + i), max_tokens=40) for i in range(14)]
    want = ids_of(alone(oracle_engine(), requests))
    killer = Killer(core, {4: ["0", "1", "nobody"], 9: ["3"], 20: ["5", "6"], 21: ["13"]})
    monkeypatch.setattr(core.executor, "result", killer.result)
    got = ids_of(run(core, requests))
    ended = {"0", "1", "3", "5", "6", "13"}
    assert len(killer.used) == 4 and all(after < before for before, after in killer.used[:3])
    assert {name: ids for name, ids in got.items() if name not in ended} == {
        name: ids for name, ids in want.items() if name not in ended
    }
    for name in ended:
        assert len(got[name]) < 40 and got[name] == want[name][: len(got[name])]
    core.scheduler.check_integrity()


def test_a_busy_loop_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds the books for long gets the abort by the other way, and nobody hangs."""
    core = engine(**TIGHT_16)
    core.add_request(request("one", [3, 4, 5], max_tokens=4))
    reports: list[EngineStats] = []
    with core._state_lock:
        thread = threading.Thread(target=core.abort_early, args=(["one"], reports.append))
        thread.start()
        thread.join(30)
        assert not thread.is_alive() and not reports
    core.abort_requests(["one"])
    assert not core.has_work()
