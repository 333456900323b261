"""The stub, for which every admin call succeeds and changes nothing."""

from __future__ import annotations

from typing import Any

from jaxengine.engine.stub import StubEngineCore

_CALLS = {
    "pause": None,
    "resume": None,
    "is_paused": False,
    "sleep": None,
    "wake_up": None,
    "is_sleeping": False,
}


class Willing(StubEngineCore):
    def utility(self, method: str, args: list[Any]) -> Any:
        return _CALLS[method] if method in _CALLS else super().utility(method, args)
