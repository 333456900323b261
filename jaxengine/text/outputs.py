"""What users get back; names and fields as in vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jaxengine.text.logprobs import PositionLogprobs

OutputKind = Literal["delta", "cumulative", "final"]


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request. Wall-clock seconds, except that `queued_ts` and `scheduled_ts` are on
    the engine's monotonic clock (only their difference, the queue time, means anything)."""

    arrival_time: float = 0.0
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0  # of all n completions, so far

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def queue_time(self) -> float | None:
        """Seconds from the engine's queue to the first step."""
        if self.queued_ts is None or self.scheduled_ts is None:
            return None
        return self.scheduled_ts - self.queued_ts


@dataclass(slots=True)
class CompletionOutput:
    """One of the n completions: everything so far, or (kind "delta") what is new.

    `finish_reason`: "stop" | "length" | "abort" | "error" (then `error` tells) | None (running).
    `stop_reason`: the stop string or stop token id that ended it; None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    embedding: bytes | None = None  # float32 as the model pooled it; see `EmbeddingOutput`

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's completions. With kind "delta" only those that have news are in `outputs`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0

    def _repr_html_(self) -> str:
        """The output as Jupyter shows it."""
        from jaxengine.text.display import output_html

        return output_html(self)

    @property
    def error(self) -> str | None:
        """The text of the first completion that ended with an error."""
        return next((o.error for o in self.outputs if o.error is not None), None)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """What `embed` gives: the vector [D], of length 1 unless asked otherwise."""

    request_id: str
    prompt_token_ids: list[int]
    embedding: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of some requests. A prompt counts once, whatever n."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def usage(latest: Iterable[RequestOutput]) -> Usage:
    """Usage from the latest output of each request; of any kind, since metrics count along."""
    prompt = completion = cached = 0
    for output in latest:
        prompt += len(output.prompt_token_ids)
        completion += output.metrics.num_generation_tokens
        cached += output.num_cached_tokens
    return Usage(prompt, completion, cached)


def merge_deltas(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """One delta that brings what both bring, for a consumer that fell behind. Changes `older`."""
    mine = {o.index: o for o in older.outputs}
    for new in newer.outputs:
        old = mine.get(new.index)
        if old is None:
            older.outputs.append(new)
            continue
        old.text += new.text
        old.token_ids += new.token_ids
        if new.logprobs is not None:
            old.logprobs = [*(old.logprobs or []), *new.logprobs]
        old.cumulative_logprob = new.cumulative_logprob
        old.finish_reason = new.finish_reason
        old.stop_reason = new.stop_reason
        old.error = new.error
    if newer.prompt_logprobs is not None:
        older.prompt_logprobs = newer.prompt_logprobs
    older.finished = newer.finished
    older.num_cached_tokens = newer.num_cached_tokens
    return older
