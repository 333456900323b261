"""The metric families of one data-parallel rank."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxengine.metrics.figures import SLEEP_STATES, Figure, place_figure
from jaxengine.wire.messages import EngineStats

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40, 80)
_COUNTS = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_STAYS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600,
    1200, 1800,
)  # fmt: skip
_STAY_TEXTS = {
    "lifetime": "From being given out to being evicted, of sampled KV blocks.",
    "idle_before_evict": "From the last use to being evicted, of sampled KV blocks.",
    "reuse_gap": "Between uses, of sampled KV blocks.",
}
_STEPS = tuple(2**i for i in range(15))
_DRAFTS = tuple(range(17))
_LOOKUPS, _HITS = "kv_offload_external_queries", "kv_offload_external_hits"
_OWN = ("sleep_level", "waiting_deferred")  # figures with families of their own below


def _one_two_five(top: int) -> tuple[int, ...]:
    values = [m * 10**e for e in range(9) for m in (1, 2, 5)]
    return tuple(v for v in values if v < top) + (top,)


class Series:
    """One rank's children of the families; a family is made by the first rank that names it."""

    def __init__(
        self,
        registry: CollectorRegistry,
        families: dict[str, Any],
        labels: dict[str, str],
        top: int,
    ) -> None:
        self._registry = registry
        self._families = families
        self._labels = labels
        self.last_stats = EngineStats()
        lengths = _one_two_five(top)
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self.gauges = {
            "num_running": gauge("num_requests_running", "Sequences in the running batch."),
            "num_waiting": gauge("num_requests_waiting", "Sequences waiting to be scheduled."),
            "kv_usage": gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
            "pipeline_depth": gauge("pipeline_depth", "Steps that may be in flight at once."),
            "num_blocks": gauge("num_kv_blocks", "Blocks in the KV pool."),
        }
        self.counters = {
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
        self.host_us = gauge(
            "host_microseconds_per_step", "Host work of a step, mean since the last message."
        )
        self.waiting_by_reason = {
            reason: self._family(
                Gauge,
                "num_requests_waiting_by_reason",
                "Waiting for room (capacity), or for a grammar or KV to arrive (deferred).",
                reason=reason,
            )
            for reason in ("capacity", "deferred")
        }
        self.sleep_state = {
            state: self._family(
                Gauge, "engine_sleep_state", "1 for the state it is in.", sleep_state=state
            )
            for state in SLEEP_STATES
        }
        self.sleep_state["awake"].set(1)
        self.last_message = gauge(
            "engine_last_message_timestamp_seconds", "Unix time of the engine's last message."
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of started sequences.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens taken from a cache.")
        self.by_source = {
            source: self._family(
                Counter,
                "prompt_tokens_by_source",
                "Prompt tokens computed here, or taken from a cache of any tier.",
                source=source,
            )
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.rejections = counter("admission_rejections", "Requests refused because of overload.")
        self.success = {
            reason: self._family(
                Counter, "request_success", "Finished sequences by reason.", finished_reason=reason
            )
            for reason in ("stop", "length", "abort", "error")
        }
        self.extra: dict[str, tuple[Figure, Any]] = {}
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Between two outputs.", _ITL)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Mean seconds a token after the first.", _ITL
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY)
        self.queue = histogram("request_queue_time_seconds", "Queued to scheduled.", _LATENCY)
        self.prefill = histogram(
            "request_prefill_time_seconds", "Scheduled to first token.", _LATENCY
        )
        self.decode = histogram("request_decode_time_seconds", "First to last token.", _LATENCY)
        self.inference = histogram(
            "request_inference_time_seconds", "Scheduled to last token.", _LATENCY
        )
        self.num_prompt = histogram("request_prompt_tokens", "Prompt tokens.", lengths)
        self.num_generated = histogram("request_generation_tokens", "Output tokens.", lengths)
        self.max_generated = histogram(
            "request_max_num_generation_tokens", "Longest output of a request's n.", lengths
        )
        self.computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", lengths
        )
        self.preemptions = histogram(
            "request_num_preemptions", "Preemptions of a sequence.", _PREEMPTIONS
        )
        self.params_n = histogram("request_params_n", "n of requests.", _COUNTS)
        self.params_max = histogram("request_params_max_tokens", "max_tokens.", lengths)
        self.iteration = histogram("iteration_tokens_total", "New tokens in a message.", _STEPS)

    def _family(
        self, kind: Any, name: str, text: str, options: dict[str, Any] | None = None, /, **more: str
    ) -> Any:
        labels = self._labels | more
        if name not in self._families:
            self._families[name] = kind(
                f"jaxengine:{name}", text, list(labels), registry=self._registry, **(options or {})
            )
        return self._families[name].labels(**labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        made: Gauge = self._family(Gauge, name, text)
        return made

    def _counter(self, name: str, text: str) -> Counter:
        made: Counter = self._family(Counter, name, text)
        return made

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made: Histogram = self._family(Histogram, name, text, {"buckets": tuple(buckets)})
        return made

    def take(self, stats: EngineStats) -> None:
        """Take over a snapshot. Counters grow by the difference, never shrink (a restarted
        engine counts from 0 again)."""
        last = self.last_stats
        for name, gauge in self.gauges.items():
            gauge.set(getattr(stats, name))
        for name, counter in self.counters.items():
            counter.inc(_growth(getattr(stats, name), getattr(last, name)))
        steps = stats.num_steps - last.num_steps
        if steps > 0:
            self.host_us.set(1e6 * _growth(stats.host_seconds, last.host_seconds) / steps)
        deferred = stats.extra.get("waiting_deferred", 0.0)
        self.waiting_by_reason["deferred"].set(deferred)
        self.waiting_by_reason["capacity"].set(max(0.0, stats.num_waiting - deferred))
        level = int(stats.extra.get("sleep_level", 0))
        for at, state in enumerate(SLEEP_STATES):
            self.sleep_state[state].set(at == level)
        if _LOOKUPS in stats.extra:  # both from the start, for their quotient
            stats.extra.setdefault(_HITS, 0.0)
        for name, value in stats.extra.items():
            if name not in _OWN:
                self._take_figure(name, value, last.extra.get(name, 0.0))
        for kind, seconds in stats.block_seconds.items():
            family = self._histogram(f"kv_block_{kind}_seconds", _STAY_TEXTS[kind], _STAYS)
            for value in seconds:
                family.observe(value)
        self.last_message.set(time.time())
        self.last_stats = stats

    def _take_figure(self, name: str, value: float, before: float) -> None:
        if name not in self.extra:
            figure = place_figure(name)
            kind = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}[figure.kind]
            options = {"buckets": _DRAFTS} if figure.kind == "histogram" else None
            made = self._family(kind, figure.family, figure.text, options, **figure.labels)
            self.extra[name] = figure, made
        figure, child = self.extra[name]
        if figure.kind == "gauge":
            child.set(value)
        elif figure.kind == "counter":
            child.inc(_growth(value, before))
        else:
            for _ in range(int(_growth(value, before))):
                child.observe(figure.value)


def _growth(value: float, before: float) -> float:
    """What a counter grew by; one that fell was begun anew."""
    return value - before if value >= before else value
