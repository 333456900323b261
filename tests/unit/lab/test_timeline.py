"""The trace of a step loop: what it notes of a toy core, and that it leaves the core as it was."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine.lab.bench.timeline import Span, busy, trace
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import EngineOutput, EngineRequest


class Executor:
    def submit(self, batch: Any) -> Any:
        time.sleep(0.002)
        return SimpleNamespace(rows=np.zeros(1))

    def result(self, handle: Any) -> Any:
        time.sleep(0.002)
        return handle.rows


class Core:
    """Submits a step a turn and takes the result of the one before: two in flight."""

    def __init__(self, steps: int = 3, error: str | None = None) -> None:
        self.executor = Executor()
        self.left, self.error = steps, error
        self.flight: list[Any] = []
        self.added: list[Any] = []

    def add_request(self, request: Any) -> None:
        self.added.append(request)

    def has_work(self) -> bool:
        return bool(self.left or self.flight)

    def step(self) -> list[EngineOutput]:
        if self.left:
            self.left -= 1
            bucket = SimpleNamespace(tokens=8)
            self.flight.append(self.executor.submit(SimpleNamespace(bucket=bucket)))
            if len(self.flight) < 2:
                return []
        self.executor.result(self.flight.pop(0))
        return [EngineOutput("a", [1], error=self.error)]


REQUEST = EngineRequest(
    request_id="a", prompt_token_ids=[1], params=SamplingParams(), arrival_time=0.0
)


def test_every_step_has_its_spans() -> None:
    core: Any = Core()
    spans = trace(core, [REQUEST])
    assert core.added == [REQUEST]
    of = {(s.lane, s.step): s for s in spans}
    assert set(of) == {
        (lane, step)
        for lane in ("plan", "dispatch", "wait", "output", "device")
        for step in range(3)
    }
    assert all(s.begin <= s.end and s.tokens == 8 for s in spans)
    assert [s.begin for s in spans] == sorted(s.begin for s in spans)
    for step in range(3):
        order = [of[lane, step] for lane in ("plan", "dispatch", "wait", "output")]
        assert all(a.end <= b.begin for a, b in zip(order, order[1:], strict=False))
    assert of["dispatch", 1].end <= of["wait", 0].begin  # planned ahead
    assert of["device", 1].begin >= of["device", 0].end


@pytest.mark.parametrize("error", [None, "bad row"])
def test_the_core_is_left_as_it_was(error: str | None) -> None:
    core: Any = Core(error=error)
    submit, result = core.executor.submit, core.executor.result
    if error is None:
        trace(core, [])
    else:
        with pytest.raises(RuntimeError, match="bad row"):
            trace(core, [])
    assert (core.executor.submit, core.executor.result) == (submit, result)


def test_busy_is_the_covered_share() -> None:
    spans = [Span("device", 0, 0.0, 1.0, 8), Span("device", 1, 2.0, 4.0, 8)]
    spans.append(Span("wait", 0, 0.0, 9.0, 8))
    assert busy(spans, "device", 0.5, 2.5) == pytest.approx(0.5)
    assert busy(spans, "plan", 0.0, 1.0) == 0.0
