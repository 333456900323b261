"""An engine core that answers with the text that the prompt asks for: behind the last SAY: in it,
as JSON {"say": text, "step": tokens of each step}. Other prompts get the stub's answer."""

from __future__ import annotations

import json
from typing import Any

from jaxengine.config import EngineConfig
from jaxengine.engine.stub import StubEngineCore
from jaxengine.text.tokenizer import load_tokenizer
from jaxengine.weights.resolve import resolve_model
from jaxengine.wire.messages import EngineOutput, EngineRequest


class Scripted(StubEngineCore):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        files = resolve_model(config.model.model)
        self._tokenizer = load_tokenizer(files, config.model.tokenizer)
        self._scripts: dict[str, tuple[list[int], int]] = {}

    def add_request(self, request: EngineRequest) -> None:
        super().add_request(request)
        prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        _, found, script = prompt.rpartition("SAY:")
        if found:
            asked, _ = json.JSONDecoder().raw_decode(script)
            ids = self._tokenizer.encode(asked["say"], add_special_tokens=False)
            ids.append(request.eos_token_ids[0])
            self._scripts[request.request_id] = (ids, asked.get("step", 1))

    def _advance(self, sequence: Any) -> EngineOutput:
        output = super()._advance(sequence)
        if output.request_id not in self._scripts:
            return output
        left, size = self._scripts[output.request_id]
        at = (sequence.num_output - 1) * size
        output.new_token_ids = left[at : min(at + size, sequence.limit)]
        if output.logprobs is not None:
            output.logprobs = output.logprobs * len(output.new_token_ids)
            for entry, token in zip(output.logprobs, output.new_token_ids, strict=True):
                entry.token_ids[0] = token
        output.finish_reason = None
        if at + size >= len(left) and len(left) <= sequence.limit:
            output.finish_reason = "stop"
        elif at + size >= sequence.limit:
            output.finish_reason = "length"
        return output
