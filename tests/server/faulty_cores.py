"""Engine cores that fail in a chosen way."""

from __future__ import annotations

import os
import signal
import time

from jaxengine.config import EngineConfig
from jaxengine.engine.stub import StubEngineCore
from jaxengine.wire.messages import EngineOutput, EngineRequest


class StepFails(StubEngineCore):
    """The fourth token of a request with max_tokens 13 is never made."""

    def step(self) -> list[EngineOutput]:
        if any(
            s.request.params.max_tokens == 13 and s.num_output == 3 for s in self._running.values()
        ):
            raise RuntimeError("the device is lost")
        return super().step()


class StepDies(StubEngineCore):
    """As StepFails, but the process is gone without a word."""

    def step(self) -> list[EngineOutput]:
        if any(
            s.request.params.max_tokens == 13 and s.num_output == 3 for s in self._running.values()
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


class RequestFails(StubEngineCore):
    """Requests fail alone: 17 is refused, 18 breaks adding, 19 breaks after three tokens."""

    def add_request(self, request: EngineRequest) -> None:
        if request.params.max_tokens == 17:
            raise ValueError("the prompt needs 9 KV blocks, the pool has 8")
        if request.params.max_tokens == 18:
            raise RuntimeError("adding broke")
        super().add_request(request)

    def step(self) -> list[EngineOutput]:
        outputs = super().step()
        for output in outputs:
            sequence = self._running.get(output.request_id)
            if sequence and sequence.request.params.max_tokens == 19 and sequence.num_output == 3:
                output.finish_reason, output.error = "error", "the logits are not numbers"
                del self._running[output.request_id]
        return outputs


class StartFails(StubEngineCore):
    def __init__(self, config: EngineConfig) -> None:
        raise RuntimeError("no device was found")


class BadSetting(StubEngineCore):
    def __init__(self, config: EngineConfig) -> None:
        raise ValueError("--max-model-len 5 is longer than the KV pool")


class SlowStart(StubEngineCore):
    def __init__(self, config: EngineConfig) -> None:
        time.sleep(60)
        super().__init__(config)
