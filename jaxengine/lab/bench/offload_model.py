"""What offload gives a conversation that returns: time to its first token, loaded from host memory
against computed again, and what the decodes beside it lose meanwhile."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import EngineRequest

LENGTH = 2000  # tokens of the conversation
NEIGHBOURS = 4


def measure(model: str, rounds: int) -> dict[str, float]:
    """Seconds and ratios; the engine's device pool holds little more than one conversation."""
    block = 16
    config = EngineConfig.of(
        model=model,
        max_model_len=4096,
        max_num_seqs=8,
        block_size=block,
        num_gpu_blocks_override=(2 * LENGTH + 1500) // block,
        kv_offloading_size=1.0,
        warmup="full",
    )
    core = EngineCore(config)
    try:
        return _measure(core, rounds)
    finally:
        core.shutdown()


def _measure(core: EngineCore, rounds: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    vocab = core.facts.spec.vocab_size

    def prompt(length: int) -> list[int]:
        return [int(i) for i in rng.integers(100, vocab, length)]

    talk = prompt(LENGTH)
    computed, loaded = [], []
    computed.append(_first_token(core, "warm", prompt(LENGTH))[0])
    computed.clear()
    for i in range(rounds):
        computed.append(_first_token(core, f"computed {i}", prompt(LENGTH))[0])
    _first_token(core, "first", talk)
    _settle(core)
    for i in range(rounds):
        for other in range(3):  # push the conversation out of device memory
            _first_token(core, f"other {i} {other}", prompt(LENGTH))
        _settle(core)
        seconds, cached = _first_token(core, f"loaded {i}", [*talk, *prompt(1)])
        assert cached >= LENGTH - 32, f"only {cached} tokens came back"
        loaded.append(seconds)
    alone, beside = _neighbours(core, talk, prompt, rounds)
    return {
        "computed_ms": 1000 * statistics.median(computed),
        "loaded_ms": 1000 * statistics.median(loaded),
        "sooner_times": statistics.median(computed) / statistics.median(loaded),
        "neighbours_alone_tokens_s": alone,
        "neighbours_beside_tokens_s": beside,
        "neighbours_lose_percent": 100 * (1 - beside / alone),
    }


def _request(name: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(
        request_id=name, prompt_token_ids=prompt, params=params, arrival_time=time.time()
    )


def _first_token(core: EngineCore, name: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the first token of a request alone, and its cached tokens."""
    began = time.perf_counter()
    core.add_request(_request(name, prompt, 1))
    while True:
        for output in core.step():
            if output.request_id == name:
                return time.perf_counter() - began, output.num_cached_tokens


def _settle(core: EngineCore) -> None:
    """Until nothing is on its way to host memory."""
    while core.has_work():
        core.step()


def _neighbours(core: EngineCore, talk: list[int], prompt: Any, rounds: int) -> tuple[float, float]:
    """Tokens/s of short requests that decode, while a short request comes and while a
    conversation is loaded: the difference is what loading costs them."""
    for i in range(NEIGHBOURS):
        core.add_request(_request(f"n{i}", prompt(16), 600))
    for _ in range(20):
        core.step()
    window = 100
    alone, beside = [], []
    for i in range(rounds):
        core.scheduler.reset_prefix_cache()
        core.add_request(_request(f"short {i}", prompt(2), 1))
        alone.append(_tokens_per_second(core, window))
        core.add_request(_request(f"back {i}", [*talk, *prompt(1)], 1))
        beside.append(_tokens_per_second(core, window))
    core.abort_requests([f"n{i}" for i in range(NEIGHBOURS)])
    _settle(core)
    return statistics.median(alone), statistics.median(beside)


def _tokens_per_second(core: EngineCore, tokens: int) -> float:
    """Of the neighbours, over so many tokens."""
    seen, began = 0, time.perf_counter()
    while seen < tokens:
        seen += sum(len(o.new_token_ids) for o in core.step() if o.request_id.startswith("n"))
    return seen / (time.perf_counter() - began)
