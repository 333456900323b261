"""An engine core without a model: canned tokens at a given pace.

`jaxengine serve --stub` and `jaxengine bench serve --stub` use it to measure and test everything
in front of the engine (HTTP, tokenizing, ZMQ, detokenizing) without a device. No JAX.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import Any

from jaxengine.config import EngineConfig
from jaxengine.executor.inject import Injector, carry_out
from jaxengine.settings.faults import parse_faults
from jaxengine.wire.messages import (
    EngineOutput,
    EngineReady,
    EngineRequest,
    EngineStats,
    TokenLogprobs,
)

VOCAB_SIZE = 49152  # the demo tokenizer's
_FIRST_TEXT_ID = 1000  # ids below hold special tokens and single bytes
_TEXT_IDS = 40000


def next_token(last: int, length: int) -> int:
    """The token that follows a sequence of `length` tokens that ends with `last`. As with a model,
    a sequence cut anywhere and given as a prompt goes on alike."""
    return _FIRST_TEXT_ID + (7 * last + 31 * length) % _TEXT_IDS


def canned_tokens(prompt: list[int], count: int) -> list[int]:
    """The first `count` tokens of the answer to `prompt`."""
    tokens, last = [], prompt[-1]
    for at in range(count):
        last = next_token(last, len(prompt) + at)
        tokens.append(last)
    return tokens


def _canned_vector(prompt: list[int]) -> bytes:
    """Eight numbers that tell prompts apart."""
    return struct.pack("<8f", *(float((sum(prompt) * (i + 1)) % 97 + 1) for i in range(8)))


class _Sequence:
    def __init__(self, request: EngineRequest, max_model_len: int) -> None:
        self.request = request
        self.added = time.monotonic()
        self.scheduled = 0.0
        self.num_output = 0
        self.last = request.prompt_token_ids[-1]
        room = max_model_len - len(request.prompt_token_ids)
        limit = request.params.max_tokens
        self.limit = room if limit is None else min(limit, room)


class StubEngineCore:
    """Same face as `EngineCore`; every running request gets one token a step.

    JAXENGINE_STUB_STEP_SECONDS (default 0) is how long a step lasts.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.max_model_len = config.model.max_model_len or 8192
        self.max_num_seqs = config.scheduler.max_num_seqs or 256
        self.step_seconds = float(os.environ.get("JAXENGINE_STUB_STEP_SECONDS", "0"))
        self._waiting: dict[str, _Sequence] = {}
        self._running: dict[str, _Sequence] = {}
        self._epoch = 0
        self._faults = Injector(parse_faults(config.fault.inject_faults))
        self._num_steps = 0
        self._step_tokens = 0
        self._step_time = 0.0

    def ready(self) -> EngineReady:
        return EngineReady(
            max_model_len=self.max_model_len,
            num_blocks=4096,
            block_size=16,
            vocab_size=VOCAB_SIZE,
            info={"core": "stub"},
        )

    def add_request(self, request: EngineRequest) -> None:
        self._waiting[request.request_id] = _Sequence(request, self.max_model_len)

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._running.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> list[EngineOutput]:
        fault = self._faults.next("step")
        if fault is not None:
            carry_out(fault)
        began = time.monotonic()
        while self._waiting and len(self._running) < self.max_num_seqs:
            request_id = next(iter(self._waiting))
            sequence = self._waiting.pop(request_id)
            sequence.scheduled = began
            self._running[request_id] = sequence
        if self.step_seconds and self._running:
            time.sleep(self.step_seconds)
        outputs = [self._advance(sequence) for sequence in self._running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        self._num_steps += 1
        self._step_tokens += len(outputs)
        self._step_time += time.monotonic() - began
        return outputs

    def _advance(self, sequence: _Sequence) -> EngineOutput:
        request, params = sequence.request, sequence.request.params
        prompt = request.prompt_token_ids
        first = sequence.num_output == 0
        token = next_token(sequence.last, len(prompt) + sequence.num_output)
        if params.allowed_token_ids:
            token = params.allowed_token_ids[sequence.num_output % len(params.allowed_token_ids)]
        sequence.num_output += 1
        sequence.last = token
        stop_ids = [] if params.stop_token_ids is None else params.stop_token_ids
        enough = sequence.num_output >= params.min_tokens
        finish, reason = None, None
        if enough and token in request.eos_token_ids and not params.ignore_eos:
            finish = "stop"
        elif enough and token in stop_ids:
            finish, reason = "stop", token
        elif sequence.num_output >= sequence.limit:
            finish = "length"
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if first and params.prompt_logprobs is not None:
            rows = [_logprobs(t, params.prompt_logprobs) for t in prompt[1:]]
            prompt_logprobs = [None, *rows]
        embedding = None
        if request.pooling is not None and finish is not None:
            embedding = _canned_vector(prompt)
        return EngineOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            logprobs=None if params.logprobs is None else [_logprobs(token, params.logprobs)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            stop_reason=reason,
            times=(sequence.added, sequence.scheduled) if first else None,
            embedding=embedding,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage=min(1.0, len(self._running) / self.max_num_seqs),
            num_steps=self._num_steps,
            step_tokens=self._step_tokens,
            step_seconds=self._step_time,
            host_seconds=self._step_time,
            num_blocks=4096,
        )

    def utility(self, method: str, args: list[Any]) -> Any:
        """Raises ValueError for an unknown method."""
        if method == "reset_prefix_cache":
            return True
        raise ValueError(f"unknown engine call {method!r}")

    # -- fault tolerance (`engine.fault.sentinel.RecoverableCore`): there is no worker to lose ----

    @property
    def worker_alive(self) -> bool:
        return True

    @property
    def epoch(self) -> int:
        return self._epoch

    def watch_worker(self, on_end: Callable[[], None]) -> None:
        """It never ends."""

    def check_worker(self) -> None:
        """It is there."""

    def on_fault(self) -> None:
        """Forget all requests."""
        self._waiting.clear()
        self._running.clear()

    def recover(self, respawn: bool) -> None:
        """Nothing is broken that a new epoch would not mend."""
        self._epoch += respawn

    def shutdown(self) -> None:
        self._waiting.clear()
        self._running.clear()


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """The token itself, then `count` best: the token again and its neighbours, falling by half."""
    best = [(token + i) % VOCAB_SIZE for i in range(count)]
    return TokenLogprobs([token, *best], [-0.5, *(-0.5 * (i + 1) for i in range(count))], 1)
