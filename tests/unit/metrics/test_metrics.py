"""What the metrics make of requests, outputs and stats; spans of requests."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxengine.metrics.figures import place_figure
from jaxengine.metrics.merge import merge_texts
from jaxengine.metrics.prometheus import Metrics, Totals, with_vllm_names
from jaxengine.metrics.status import status_line
from jaxengine.metrics.tracing import TRACE_HEADERS, Tracer, traces_url
from jaxengine.sampling_params import SamplingParams
from jaxengine.server.http_metrics import HttpMetrics
from jaxengine.settings.tracing import check_tracing
from jaxengine.wire.messages import EngineOutput, EngineRequest, EngineStats


def _requests(n: int, prompt: int = 10) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=f"{i}_chatcmpl-7-deadbeef" if n > 1 else "chatcmpl-7-deadbeef",
            prompt_token_ids=list(range(prompt)),
            params=SamplingParams(max_tokens=20, temperature=0.5),
            arrival_time=1000.0,
        )
        for i in range(n)
    ]


def _samples(metrics: Metrics, vllm: bool = False) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, sorted label values without model and engine) -> value."""
    found = {}
    text = with_vllm_names(metrics.render()) if vllm else metrics.render()
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, tuple(labels[k] for k in sorted(labels))] = sample.value
    return found


def _run(metrics: Metrics, n: int = 2) -> None:
    requests = _requests(n)
    metrics.added(requests, time.monotonic() - 2.0, [0] * n)
    for i, request in enumerate(requests):
        first = EngineOutput(request.request_id, [5], num_cached_tokens=4, times=(10.0, 10.25))
        metrics.outputs([first], time.monotonic() - 1.0)
        metrics.outputs([EngineOutput(request.request_id, [6, 7 + i][: i + 1])], time.monotonic())
        metrics.finished(request.request_id, "length")
        metrics.finished(request.request_id, "abort")  # too late: changes nothing


def test_a_request_of_two() -> None:
    metrics = Metrics("m", 1000)
    _run(metrics)
    found = _samples(metrics)
    assert found["jaxengine:request_success_total", ("length",)] == 2
    assert found["jaxengine:request_success_total", ("abort",)] == 0
    assert found["jaxengine:request_params_n_sum", ()] == 2
    assert found["jaxengine:prompt_tokens_by_source_total", ("local_cache_hit",)] == 8
    assert found["jaxengine:prompt_tokens_by_source_total", ("local_compute",)] == 12
    assert found["jaxengine:request_prefill_kv_computed_tokens_sum", ()] == 12
    # the longer of the two has 3 tokens; one observation for both
    assert found["jaxengine:request_max_num_generation_tokens_sum", ()] == 3
    assert found["jaxengine:request_max_num_generation_tokens_count", ()] == 1
    assert found["jaxengine:generation_tokens_total", ()] == 5
    assert found["jaxengine:request_queue_time_seconds_sum", ()] == pytest.approx(0.5)


def test_preemptions_and_where_tokens_came_from() -> None:
    metrics = Metrics("m", 1000)
    [request] = _requests(1)
    metrics.added([request], time.monotonic(), [0])
    first = EngineOutput(request.request_id, [5], num_cached_tokens=8, num_external_tokens=6)
    metrics.outputs([first], time.monotonic())
    metrics.outputs([EngineOutput(request.request_id, [6], num_preemptions=2)], time.monotonic())
    metrics.finished(request.request_id, "stop")
    found = _samples(metrics)
    assert found["jaxengine:request_num_preemptions_sum", ()] == 2
    assert found["jaxengine:request_num_preemptions_count", ()] == 1
    assert found["jaxengine:prompt_tokens_by_source_total", ("external_kv_transfer",)] == 6
    assert found["jaxengine:prompt_tokens_by_source_total", ("local_cache_hit",)] == 2
    assert found["jaxengine:prompt_tokens_by_source_total", ("local_compute",)] == 2


def test_block_seconds_are_observed_once_each() -> None:
    metrics = Metrics("m", 1000)
    assert ("jaxengine:kv_block_lifetime_seconds_count", ()) not in _samples(metrics)
    metrics.stats(EngineStats(block_seconds={"lifetime": [0.5, 4.0], "reuse_gap": []}))
    metrics.stats(EngineStats(block_seconds={"lifetime": [1.5], "reuse_gap": [0.25]}))
    found = _samples(metrics)
    assert found["jaxengine:kv_block_lifetime_seconds_sum", ()] == 6
    assert found["jaxengine:kv_block_lifetime_seconds_bucket", ("2.0",)] == 2
    assert found["jaxengine:kv_block_reuse_gap_seconds_count", ()] == 1


def test_texts_of_several_processes() -> None:
    """Families of HTTP are in the processes' texts only; their samples add up."""
    engines, parts = Metrics("m", 1000), []
    for count in (1, 2):
        http, metrics = HttpMetrics(), Metrics("m", 1000)
        for _ in range(count):
            http.observe("/v1/completions", "POST", 200, 0.2, 10, 100)
            _run(metrics)
        parts.append(metrics.render() + http.render())
    http.observe("/ping", "GET", 0, 0.2, 10, 0)
    parts.append(engines.render() + http.render())
    merged = merge_texts(engines.render(), parts)
    found = {
        (sample.name, sample.labels.get("handler")): sample.value
        for family in text_string_to_metric_families(merged.decode())
        for sample in family.samples
    }
    assert found["jaxengine:http_requests_total", "/v1/completions"] == 5
    assert found["jaxengine:http_requests_total", "/ping"] == 1
    assert found["jaxengine:http_response_size_bytes_sum", "/v1/completions"] == 500
    assert found["jaxengine:http_request_duration_highr_seconds_count", None] == 6
    assert found["jaxengine:generation_tokens_total", None] == 15
    lines = merged.decode().splitlines()
    assert len([x for x in lines if x.startswith("# TYPE jaxengine:http_")]) == 5
    assert len(lines) == len(set(lines))


def test_figures_become_families() -> None:
    metrics = Metrics("m", 1000)
    figures = {
        "spec_num_drafts": 4.0,
        "spec_num_accepted_tokens_pos_1": 3.0,
        "spec_steps_k2": 5.0,
        "kv_offload_external_hits": 32.0,
        "kv_offload_host_usage": 0.25,
        "kv_offload_jobs_in_flight": 2.0,
        "kv_offload_fs_read_errors": 1.0,
        "dbo_steps": 6.0,
        "dbo_off_too_small": 2.0,
        "bucket_mixed_256_64": 9.0,
        "waiting_deferred": 1.0,
        "sleep_level": 2.0,
    }
    metrics.stats(EngineStats(num_waiting=3, num_steps=10, host_seconds=0.002, extra=figures))
    found = _samples(metrics)
    wanted = {
        ("spec_decode_num_drafts_total", ()): 4,
        ("spec_decode_num_accepted_tokens_per_pos_total", ("1",)): 3,
        ("dynamic_sd_k_count", ()): 5,
        ("dynamic_sd_k_sum", ()): 10,
        ("external_prefix_cache_hits_total", ()): 32,
        ("cpu_cache_usage_perc", ()): 0.25,
        ("kv_offload_jobs_in_flight", ()): 2,
        ("kv_offload_fs_read_errors_total", ()): 1,
        ("dbo_steps_total", ("ran", "")): 6,
        ("dbo_steps_total", ("skipped", "too_small")): 2,
        ("bucket_steps_total", ("mixed", "64", "256")): 9,
        ("num_requests_waiting_by_reason", ("deferred",)): 1,
        ("num_requests_waiting_by_reason", ("capacity",)): 2,
        ("engine_sleep_state", ("discard_all",)): 1,
        ("engine_sleep_state", ("awake",)): 0,
        ("host_microseconds_per_step", ()): pytest.approx(200),
    }
    assert {k: found[f"jaxengine:{k[0]}", k[1]] for k in wanted} == wanted
    assert place_figure("odd-name").family == "odd_name"
    assert place_figure("kv_offload_fs_read_blocks").kind == "counter"
    assert place_figure("kv_offload_host_blocks").kind == "gauge"


def test_counters_of_an_engine_that_began_anew() -> None:
    """B48: they grow on, they never fall."""
    metrics = Metrics("m", 1000)
    metrics.stats(EngineStats(num_steps=10, extra={"spec_num_drafts": 7.0}))
    metrics.stats(EngineStats(num_steps=3, extra={"spec_num_drafts": 2.0}))
    found = _samples(metrics)
    assert found["jaxengine:engine_steps_total", ()] == 13
    assert found["jaxengine:spec_decode_num_drafts_total", ()] == 9


def test_vllm_names_are_the_same_series() -> None:
    metrics = Metrics("m", 1000)
    metrics.describe({"block_size": "16"})
    _run(metrics)
    found = _samples(metrics, vllm=True)
    ours = {k: v for k, v in found.items() if k[0].startswith("jaxengine:")}
    theirs = {(f"jaxengine:{k[0][5:]}", k[1]): v for k, v in found.items() if k[0][:5] == "vllm:"}
    assert len(ours) > 300 and theirs == ours
    assert found["vllm:cache_config_info", ("16",)] == 1
    assert not any(name.startswith("vllm:") for name, _ in _samples(metrics))


def test_status_line_has_rates_of_the_interval() -> None:
    before = Totals(100, 200, EngineStats(prefix_queries=50, prefix_hits=50))
    stats = EngineStats(num_running=2, kv_usage=0.5, prefix_queries=150, prefix_hits=75)
    line = status_line(before, Totals(200, 260, stats), 10.0)
    for part in ("prompt 10.0 tok/s", "generation 6.0 tok/s", "running 2", "KV 50.0%", "25.0%"):
        assert part in line


@pytest.mark.parametrize("sampled", ["01", "00"])
def test_one_span_a_request(sampled: str) -> None:
    """Children of the client's span, with vLLM's attributes; whether there are spans is not the
    client's to say (L10)."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    metrics = Metrics("m", 1000)
    metrics.tracer = Tracer("http://127.0.0.1:1", kept)
    token = TRACE_HEADERS.set({"traceparent": f"00-{'a' * 32}-{'b' * 16}-{sampled}"})
    try:
        _run(metrics)
    finally:
        TRACE_HEADERS.reset(token)
    [refused] = _requests(1)
    metrics.added([refused], time.monotonic(), [0])
    metrics.finished(refused.request_id, "error")  # without a token
    metrics.tracer.close()
    span, failed = kept.get_finished_spans()
    assert span.name == "llm_request" and span.parent is not None
    assert f"{span.context.trace_id:032x}" == "a" * 32 and f"{span.parent.span_id:016x}" == "b" * 16
    found: dict[str, Any] = dict(span.attributes or {})
    wanted = {
        "gen_ai.request.id": "chatcmpl-7",
        "gen_ai.response.model": "m",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.latency.time_in_queue": 0.25,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(1.0, abs=0.1)
    assert found["gen_ai.latency.e2e"] == pytest.approx(2.0, abs=0.1)
    assert span.start_time == 1000 * 10**9 and span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(2.0, abs=0.1)
    assert not failed.status.is_ok and failed.parent is None
    assert "gen_ai.latency.time_to_first_token" not in (failed.attributes or {})


def test_traces_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing(None)
    check_tracing("http://collector:4318")
    assert traces_url("http://collector:4318/") == "http://collector:4318/v1/traces"
    assert traces_url("http://collector/own/path") == "http://collector/own/path"
    with pytest.raises(ValueError, match="--otlp-traces-endpoint must be an http"):
        check_tracing("collector:4317")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name.startswith("opentelemetry.exporter") else real(name),
    )
    with pytest.raises(ValueError, match=r"needs the extra otel: pip install 'jaxengine\[otel\]'"):
        check_tracing("http://collector:4318")
