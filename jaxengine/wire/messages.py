"""The wire types between front and engine (msgpack through msgspec; never pickle)."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from jaxengine.sampling_params import SamplingParams, ThinkingBudget

# stop_reason of a request that the engine did not run
INVALID_REQUEST = "invalid_request"  # it is wrong: HTTP 400
UNAVAILABLE = "unavailable"  # it reached an engine which cannot take it: HTTP 503
OVERLOADED = "overloaded"  # the same, of one that found too many waiting


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence for the engine, validated and tokenized (n > 1 was fanned out before)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    eos_token_ids: list[int] = []  # the one EOS set: grammar, min_tokens, ignore_eos, stop use it
    bad_words_token_ids: list[list[int]] = []
    priority: int = 0
    cache_salt: str | None = None
    thinking: ThinkingBudget | None = None
    pooling: str | None = None  # "last" | "mean": one vector of the prompt is wanted, no text


class Siblings(msgspec.Struct, array_like=True):
    """The sequences of one request on their way: what they have in common is sent once, and is
    one object at the other end too."""

    first: EngineRequest
    rest: list[tuple[str, int | None]] = []  # id and seed of each of the others

    @classmethod
    def of(cls, requests: list[EngineRequest]) -> Siblings:
        rest = [(request.request_id, request.params.seed) for request in requests[1:]]
        return cls(requests[0], rest)

    def ids(self) -> list[str]:
        return [self.first.request_id, *(request_id for request_id, _ in self.rest)]

    def requests(self) -> list[EngineRequest]:
        return [self.first, *siblings_of(self.first, self.rest)]


def siblings_of(
    first: EngineRequest, others: Iterable[tuple[str, int | None]]
) -> list[EngineRequest]:
    """Sequences as `first` with these ids and seeds. The prompt's log-probabilities are left to
    `first`. Copies, not replacements, which would check the parameters again."""
    requests = []
    for request_id, seed in others:
        request, params = copy(first), copy(first.params)
        force_setattr(params, "seed", seed)
        if params.prompt_logprobs is not None:
            force_setattr(params, "prompt_logprobs", None)
            force_setattr(params, "skip_reading_prefix_cache", False)
        request.request_id, request.params = request_id, params
        requests.append(request)
    return requests


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position; the position's own token comes first in both lists.

    `rank` is how many tokens have a log-probability >= that token's (1 = the most likely).
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # whole prompt, once; [0] is None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    # monotonic seconds of the engine process: queued, first scheduled
    times: tuple[float, float] | None = None
    num_preemptions: int = 0  # of the sequence so far
    num_external_tokens: int = 0  # of num_cached_tokens, from a tier behind the device
    embedding: bytes | None = None  # float32, as pooled; not normalised


class EngineStats(msgspec.Struct, omit_defaults=True):
    """A snapshot of gauges, and counters since start (monotone)."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    num_compilations: int = 0
    compilations_after_warmup: int = 0
    num_steps: int = 0
    step_tokens: int = 0
    host_seconds: float = 0.0
    step_seconds: float = 0.0
    nan_rows: int = 0
    pipeline_depth: int = 1
    num_blocks: int = 0
    extra: dict[str, float] = {}
    # seconds that sampled KV blocks stayed, by kind; those since the last snapshot
    block_seconds: dict[str, list[float]] = {}


class EngineOutputs(msgspec.Struct, omit_defaults=True):
    """One message from an engine: the outputs of a step, and its stats."""

    engine_index: int = 0
    outputs: list[EngineOutput] = []
    stats: EngineStats | None = None


class RankStatus(msgspec.Struct, omit_defaults=True):
    """What an engine says of itself, pushed at every change. States: healthy, unhealthy (a fault;
    waits for an order), dead (its worker process is gone; waits for `respawn`), draining."""

    rank: int
    state: str = "healthy"
    epoch: int = 0  # of the worker process (and of its group, where ranks are coupled)
    fault_info: str | None = None  # class of the exception alone: messages may hold user data
    since: float = 0.0  # Unix time


class FaultToleranceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An order to an engine. Instructions: retry, respawn, drain."""

    request_id: str
    instruction: str
    params: dict[str, Any] = {}


class FaultToleranceResult(msgspec.Struct, omit_defaults=True):
    """The answer to an order; never an exception."""

    request_id: str
    rank: int
    success: bool
    reason: str = ""


class UtilityCall(msgspec.Struct):
    """A named call of the engine (`reset_prefix_cache`, ...), answered by `UtilityResult`."""

    call_id: int
    method: str
    args: list[Any] = []


class UtilityResult(msgspec.Struct, omit_defaults=True):
    call_id: int
    result: Any = None
    error: str | None = None


class EngineReady(msgspec.Struct, omit_defaults=True):
    """Sent once by an engine process when it can serve."""

    engine_index: int = 0
    max_model_len: int = 0
    num_blocks: int = 0
    block_size: int = 0
    vocab_size: int = 0
    info: dict[str, str] = {}
