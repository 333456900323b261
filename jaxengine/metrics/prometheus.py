"""The engine's Prometheus metrics, filled from engine outputs and stats at the front.

Names, definitions and buckets follow vLLM's under `jaxengine:`. A sequence is one engine request:
a request with n=3 counts as three in the per-sequence families.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics, generate_latest

from jaxengine.metrics.ranks import RankMetrics
from jaxengine.metrics.series import Series
from jaxengine.metrics.tracing import TRACE_HEADERS, RequestSpan, Tracer
from jaxengine.wire.merge import merge_stats
from jaxengine.wire.messages import EngineOutput, EngineRequest, EngineStats

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series that nobody reads

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class _Siblings:
    """The n sequences of one request; times as in `_Record`."""

    request: EngineRequest  # the first of them
    n: int
    headers: dict[str, str] | None  # of the trace that the client is in
    left: int
    most: int = 0  # tokens of the longest
    num_tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    queued: float = 0.0
    reason: str = "stop"  # of the one that ended last, unless another one failed

    def ended(self, record: _Record, reason: str) -> None:
        self.left -= 1
        self.most = max(self.most, record.num_tokens)
        self.num_tokens += record.num_tokens
        if record.num_tokens and (not self.first or record.first < self.first):
            self.first, self.queued = record.first, record.queued
        self.last = max(self.last, record.last)
        self.reason = self.reason if self.reason == "error" else reason

    def span(self, model: str, arrival: float) -> RequestSpan:
        """`arrival` on the clock of the other times."""
        request, last = self.request, self.last or time.monotonic()
        params, started = request.params, self.num_tokens > 0
        since = self.first - arrival if started else 0.0
        return RequestSpan(
            request_id=request.request_id.removeprefix("0_").rsplit("-", 1)[0],
            model=model,
            arrival=request.arrival_time,
            headers=self.headers,
            n=self.n,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=self.num_tokens,
            finish_reason=self.reason,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            e2e=last - arrival,
            queue=self.queued,
            first_token=since if started else None,
            prefill=max(0.0, since - self.queued),
            decode=last - self.first if started else 0.0,
        )


@dataclass
class _Record:
    """What one sequence has done so far; times in seconds of time.monotonic at the front."""

    series: Series
    siblings: _Siblings
    arrival: float
    num_prompt: int
    max_tokens: int | None
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    queued: float = 0.0  # seconds, of the engine's clock


@dataclass
class Totals:
    """Sums for the status line."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


class Metrics:
    """One model's metrics in a registry of their own; every series has the label `engine`, the
    data-parallel rank."""

    def __init__(
        self, model_name: str, max_model_len: int = 32768, ranks: Iterable[int] = (0,)
    ) -> None:
        self.registry = CollectorRegistry()
        self.tracer: Tracer | None = None
        self._model = model_name
        self.totals = Totals()
        families: dict[str, Any] = {}
        self._ranks = {
            rank: Series(
                self.registry,
                families,
                {"model_name": model_name, "engine": str(rank)},
                max_model_len,
            )
            for rank in ranks
        }
        self._first = next(iter(self._ranks.values()))
        self.health = RankMetrics(self.registry, model_name, self._ranks)
        self._records: dict[str, _Record] = {}

    def added(self, requests: list[EngineRequest], now: float, ranks: list[int]) -> None:
        """A request was sent to these ranks as these sequences."""
        count = len(requests)
        siblings = _Siblings(requests[0], count, TRACE_HEADERS.get(), left=count)
        for request, rank in zip(requests, ranks, strict=True):
            self._records[request.request_id] = _Record(
                self._ranks[rank],
                siblings,
                now,
                len(request.prompt_token_ids),
                request.params.max_tokens,
            )
        self._ranks[ranks[0]].params_n.observe(len(requests))

    def describe(self, facts: dict[str, str]) -> None:
        """What the KV caches are made of, as labels of `cache_config_info`. Call it once."""
        family = Gauge(
            "jaxengine:cache_config_info",
            "1; the labels say what the KV cache is made of.",
            ["engine", *facts],
            registry=self.registry,
        )
        for rank in self._ranks:
            family.labels(engine=str(rank), **facts).set(1)

    def rejected(self) -> None:
        """Counted for the first rank: no engine has seen the request."""
        self._first.rejections.inc()

    def aborted_early(self, count: int) -> None:
        """Of a request whose client left before any engine had seen it: its sequences."""
        self._first.success["abort"].inc(count)

    def outputs(self, outputs: list[EngineOutput], now: float, rank: int = 0) -> None:
        """New tokens of a rank. Call `finished` for sequences that end, whoever ended them."""
        series = self._ranks[rank]
        total = 0
        for output in outputs:
            record = self._records.get(output.request_id)
            if record is None:
                continue
            record.num_preemptions = output.num_preemptions
            if output.times is not None:
                record.queued = max(0.0, output.times[1] - output.times[0])
            count = len(output.new_token_ids)
            if not count:
                continue
            record.series = series  # it may have moved
            if record.num_tokens == 0:
                record.first = now
                series.ttft.observe(now - record.arrival)
                series.prompt_tokens.inc(record.num_prompt)
                self.totals.prompt_tokens += record.num_prompt
                record.num_cached = min(output.num_cached_tokens, record.num_prompt)
                series.cached_tokens.inc(record.num_cached)
                external = min(output.num_external_tokens, record.num_cached)
                series.by_source["external_kv_transfer"].inc(external)
                series.by_source["local_cache_hit"].inc(record.num_cached - external)
                series.by_source["local_compute"].inc(record.num_prompt - record.num_cached)
            else:
                series.itl.observe(now - record.last)
            record.last = now
            record.num_tokens += count
            total += count
        if total:
            series.generation_tokens.inc(total)
            series.iteration.observe(total)
            self.totals.generation_tokens += total

    def finished(self, request_id: str, reason: str) -> None:
        """A sequence ended; a second call for the same one changes nothing."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        series = record.series
        series.success[reason].inc()
        series.num_prompt.observe(record.num_prompt)
        series.num_generated.observe(record.num_tokens)
        siblings = record.siblings
        siblings.ended(record, reason)
        if not siblings.left:
            series.max_generated.observe(siblings.most)
            if self.tracer is not None:
                self.tracer.request_ended(siblings.span(self._model, record.arrival))
        if record.max_tokens is not None:
            series.params_max.observe(record.max_tokens)
        if record.num_tokens == 0:
            return
        series.preemptions.observe(record.num_preemptions)
        series.computed.observe(record.num_prompt - record.num_cached)
        decode = record.last - record.first
        prefill = max(0.0, record.first - record.arrival - record.queued)
        series.e2e.observe(record.last - record.arrival)
        series.queue.observe(record.queued)
        series.prefill.observe(prefill)
        series.decode.observe(decode)
        series.inference.observe(prefill + decode)
        if record.num_tokens > 1:
            series.tpot.observe(decode / (record.num_tokens - 1))

    def stats(self, stats: EngineStats, rank: int = 0) -> None:
        """Take over a rank's snapshot."""
        self._ranks[rank].take(stats)
        self.totals.stats = merge_stats([s.last_stats for s in self._ranks.values()])

    def engine_gone(self, rank: int | None = None) -> None:
        """Nothing runs any more, on that rank or anywhere."""
        for number, series in self._ranks.items():
            if rank in (None, number):
                for name in ("num_running", "num_waiting", "kv_usage"):
                    series.gauges[name].set(0)
                    setattr(series.last_stats, name, 0)

    def render(self) -> bytes:
        """The text exposition."""
        self.health.tick()
        return generate_latest(self.registry)


def with_vllm_names(text: bytes) -> bytes:
    """Every family a second time under vllm:, those of HTTP without a prefix, as vLLM has them."""
    named = re.sub(rb"(?m)^(# (?:HELP|TYPE) )?jaxengine:(?!http_)", rb"\1vllm:", text)
    return text + re.sub(rb"(?m)^(# (?:HELP|TYPE) )?jaxengine:http_", rb"\1http_", named)
