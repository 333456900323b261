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

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from jaxengine.engine.messages import EngineOutput, EngineRequest, EngineStats

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series that nobody reads

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40, 80)
_COUNTS = (1, 2, 5, 10, 20)
_STEPS = tuple(2**i for i in range(15))
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _one_two_five(top: int) -> tuple[int, ...]:
    values = [m * 10**e for e in range(9) for m in (1, 2, 5)]
    return tuple(v for v in values if v < top) + (top,)


@dataclass
class _Record:
    """What one sequence has done so far; times in seconds of time.monotonic at the front."""

    arrival: float
    num_prompt: int
    max_tokens: int | None
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0
    queued: float = 0.0  # seconds, of the engine's clock


@dataclass
class Totals:
    """Sums for the status line."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


class Metrics:
    """One model's metrics in a registry of their own."""

    def __init__(self, model_name: str, max_model_len: int = 32768, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        self.totals = Totals()
        self._labels = {"model_name": model_name, "engine": engine}
        self._records: dict[str, _Record] = {}
        self._last_stats = EngineStats()
        lengths = _one_two_five(max_model_len)
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._gauges = {
            "num_running": gauge("num_requests_running", "Sequences in the running batch."),
            "num_waiting": gauge("num_requests_waiting", "Sequences waiting to be scheduled."),
            "kv_usage": gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
            "pipeline_depth": gauge("pipeline_depth", "Steps that may be in flight at once."),
            "num_blocks": gauge("num_kv_blocks", "Blocks in the KV pool."),
        }
        self._counters = {
            "num_preemptions": counter("num_preemptions", "Preempted sequences."),
            "prefix_queries": counter("prefix_cache_queries", "Prompt tokens looked up."),
            "prefix_hits": counter("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            "num_compilations": counter("compilations", "XLA compilations."),
            "compilations_after_warmup": counter(
                "compilations_after_warmup", "XLA compilations after the warm-up ended."
            ),
            "num_steps": counter("engine_steps", "Steps run."),
            "step_tokens": counter("engine_step_tokens", "Tokens fed to the device."),
            "host_seconds": counter("host_seconds", "Seconds of host work in the step loop."),
            "step_seconds": counter("step_seconds", "Seconds of steps, device and host."),
            "nan_rows": counter("corrupted_requests", "Rows whose logits held NaN or no choice."),
        }
        self._last_message = gauge(
            "engine_last_message_timestamp_seconds", "Unix time of the engine's last message."
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of started sequences.")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens taken from a cache.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._rejections = counter("admission_rejections", "Requests refused because of overload.")
        self._success = Counter(
            "jaxengine:request_success",
            "Finished sequences by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._labels, finished_reason=reason)
        self._extra: dict[str, Gauge] = {}
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Between two outputs.", _ITL)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean seconds a token after the first.", _ITL
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY)
        self._queue = histogram("request_queue_time_seconds", "Queued to scheduled.", _LATENCY)
        self._prefill = histogram(
            "request_prefill_time_seconds", "Scheduled to first token.", _LATENCY
        )
        self._decode = histogram("request_decode_time_seconds", "First to last token.", _LATENCY)
        self._inference = histogram(
            "request_inference_time_seconds", "Scheduled to last token.", _LATENCY
        )
        self._num_prompt = histogram("request_prompt_tokens", "Prompt tokens.", lengths)
        self._num_generated = histogram("request_generation_tokens", "Output tokens.", lengths)
        self._params_n = histogram("request_params_n", "n of requests.", _COUNTS)
        self._params_max = histogram("request_params_max_tokens", "max_tokens.", lengths)
        self._iteration = histogram("iteration_tokens_total", "New tokens in a message.", _STEPS)

    def _family(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        family = kind(
            f"jaxengine:{name}", text, list(self._labels), registry=self.registry, **options
        )
        return family.labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        made: Gauge = self._family(Gauge, name, text)
        return made

    def _counter(self, name: str, text: str) -> Counter:
        made: Counter = self._family(Counter, name, text)
        return made

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made: Histogram = self._family(Histogram, name, text, buckets=tuple(buckets))
        return made

    def added(self, requests: list[EngineRequest], now: float) -> None:
        """A request was sent to the engine as these sequences."""
        for request in requests:
            self._records[request.request_id] = _Record(
                now, len(request.prompt_token_ids), request.params.max_tokens
            )
        self._params_n.observe(len(requests))

    def rejected(self) -> None:
        self._rejections.inc()

    def outputs(self, outputs: list[EngineOutput], now: float) -> None:
        """New tokens. Call `finished` for sequences that end, whoever ended them."""
        total = 0
        for output in outputs:
            record = self._records.get(output.request_id)
            if record is None:
                continue
            if output.times is not None:
                record.queued = max(0.0, output.times[1] - output.times[0])
            count = len(output.new_token_ids)
            if not count:
                continue
            if record.num_tokens == 0:
                record.first = now
                self._ttft.observe(now - record.arrival)
                self._prompt_tokens.inc(record.num_prompt)
                self.totals.prompt_tokens += record.num_prompt
                record.num_cached = min(output.num_cached_tokens, record.num_prompt)
                self._cached_tokens.inc(record.num_cached)
            else:
                self._itl.observe(now - record.last)
            record.last = now
            record.num_tokens += count
            total += count
        if total:
            self._generation_tokens.inc(total)
            self._iteration.observe(total)
            self.totals.generation_tokens += total

    def finished(self, request_id: str, reason: str) -> None:
        """A sequence ended; a second call for the same one changes nothing."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._num_prompt.observe(record.num_prompt)
        self._num_generated.observe(record.num_tokens)
        if record.max_tokens is not None:
            self._params_max.observe(record.max_tokens)
        if record.num_tokens == 0:
            return
        decode = record.last - record.first
        prefill = max(0.0, record.first - record.arrival - record.queued)
        self._e2e.observe(record.last - record.arrival)
        self._queue.observe(record.queued)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)
        if record.num_tokens > 1:
            self._tpot.observe(decode / (record.num_tokens - 1))

    def stats(self, stats: EngineStats) -> None:
        """Take over a snapshot. Counters grow by the difference, never shrink (a restarted
        engine counts from 0 again)."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, counter in self._counters.items():
            counter.inc(max(0.0, getattr(stats, name) - getattr(self._last_stats, name)))
        for name, value in stats.extra.items():
            if name not in self._extra:
                clean = re.sub(r"[^a-zA-Z0-9_]", "_", name)
                self._extra[name] = self._gauge(clean, f"Engine figure {name}.")
            self._extra[name].set(value)
        self._last_message.set(time.time())
        self._last_stats = stats
        self.totals.stats = stats

    def engine_gone(self) -> None:
        """Nothing runs any more."""
        for name in ("num_running", "num_waiting", "kv_usage"):
            self._gauges[name].set(0)

    def render(self, compat: str = "none") -> bytes:
        """The text exposition; with compat "vllm" every family a second time under vllm:."""
        text = generate_latest(self.registry)
        if compat == "vllm":
            text += re.sub(rb"(?m)^(# (?:HELP|TYPE) )?jaxengine:", rb"\1vllm:", text)
        return text
