"""A stub engine that can be profiled, put to sleep and paused as the real one is."""

from __future__ import annotations

from typing import Any

from jaxengine.config import EngineConfig
from jaxengine.engine.stub import StubEngineCore
from jaxengine.executor.profile import Profiler


class Profiled(StubEngineCore):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._profiler = Profiler(config)

    def utility(self, method: str, args: list[Any]) -> Any:
        calls = {"start_profile": self._profiler.start, "stop_profile": self._profiler.stop}
        return calls[method]() if method in calls else super().utility(method, args)
