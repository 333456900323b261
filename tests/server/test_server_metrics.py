"""Dashboard, alerts and traces against a running engine."""

from __future__ import annotations

import json
import pathlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import tiny_model
import yaml
from serverlib import ROOT, Server, call, eventually, metric, running

from jaxengine.wire.frames import DEFAULT_CORE

C = "/v1/completions"
CONFIGS = ROOT / "configs"
NAME = re.compile(r"jaxengine:[a-z0-9_]+")


class Collector:
    """What an OpenTelemetry collector would get: spans as OTLP's protobuf."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend((resource.resource, span) for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """The real engine with all that has figures of its own: drafts, a host tier."""
    model = tiny_model.build(tmp_path_factory.mktemp("tiny"))
    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256"]
    flags += ["--num-gpu-blocks-override", "24", "--warmup", "lazy", "--served-model-name", "tiny"]
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    flags += ["--speculative-config", json.dumps(drafts), "--kv-offloading-size", "0.01"]
    flags += ["--kv-cache-metrics", "--kv-cache-metrics-sample", "1", "--enable-mfu-metrics"]
    flags += ["--metrics-compat", "vllm", "--otlp-traces-endpoint", collector.url]
    with running(model, *flags, core=DEFAULT_CORE) as server:
        body = {"prompt": "again and again and again", "max_tokens": 40, "temperature": 0}
        headers = {"traceparent": f"00-{'c' * 32}-{'d' * 16}-01", "X-Request-Id": "mine"}
        status, answer, _ = call(server.url, C, body | {"ignore_eos": True}, headers=headers)
        assert status == 200, answer
        eventually(lambda: metric(server.url, "num_requests_running") == 0)
        yield server


def _exposed(up: Server) -> set[str]:
    """Names of all samples, and of their families."""
    lines = call(up.url, "/metrics")[1].splitlines()
    families = {line.split(" ")[2] for line in lines if line.startswith("# TYPE ")}
    return {re.split(r"[{ ]", line)[0] for line in lines if line[:1] != "#"} | families


def test_dashboard_asks_for_what_there_is(up: Server) -> None:
    text = (CONFIGS / "grafana/jaxengine.json").read_text(encoding="utf-8")
    board = json.loads(text)
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    asked = {name for p in panels for t in p["targets"] for name in NAME.findall(t["expr"])}
    assert len(panels) > 25 and len(asked) > 35
    assert asked | set(NAME.findall(text)) <= _exposed(up)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"]
            assert expression.count("(") == expression.count(")"), panel["title"]
            assert expression.count("{") == expression.count("}"), panel["title"]


def test_alerts_ask_for_what_there_is(up: Server) -> None:
    settings = yaml.safe_load((CONFIGS / "prometheus/prometheus.yml").read_text())
    [file] = settings["rule_files"]
    [group] = yaml.safe_load((CONFIGS / "prometheus" / file).read_text())["groups"]
    asked = {name for rule in group["rules"] for name in NAME.findall(rule["expr"])}
    assert len(group["rules"]) > 8 and asked <= _exposed(up)
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names))
    assert all(rule["annotations"]["summary"] for rule in group["rules"])


def test_names_that_users_of_vllm_know(up: Server) -> None:
    exposed = _exposed(up)
    for name in """num_requests_running num_requests_waiting num_requests_waiting_by_reason
        kv_cache_usage_perc cache_config_info engine_sleep_state prompt_tokens_total
        generation_tokens_total prompt_tokens_cached_total prompt_tokens_by_source_total
        request_success_total num_preemptions_total prefix_cache_queries_total
        prefix_cache_hits_total external_prefix_cache_queries_total corrupted_requests_total
        admission_rejections_total time_to_first_token_seconds_bucket
        inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket
        e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
        request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
        request_inference_time_seconds_bucket request_prompt_tokens_bucket
        request_generation_tokens_bucket request_max_num_generation_tokens_bucket
        request_params_n_bucket request_params_max_tokens_bucket iteration_tokens_total_bucket
        request_prefill_kv_computed_tokens_bucket spec_decode_num_drafts_total
        spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
        spec_decode_num_accepted_tokens_per_pos_total request_num_preemptions_bucket
        kv_block_lifetime_seconds_bucket kv_block_idle_before_evict_seconds_bucket
        kv_block_reuse_gap_seconds_bucket estimated_flops_per_gpu_total
        estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total
        num_requests_kv_fetch_by_stage""".split():
        assert f"vllm:{name}" in exposed and f"jaxengine:{name}" in exposed, name
    for name in ("pipeline_depth", "compilations_total", "host_microseconds_per_step"):
        assert metric(up.url, name) > 0, name


def test_http_requests_are_counted(up: Server) -> None:
    """By route, not by path; under the names that dashboards for FastAPI know too."""
    assert call(up.url, "/v1/responses/resp_1")[0] == 404
    before = metric(up.url, "http_requests_total", handler="/v1/responses/{response_id}")
    assert call(up.url, "/v1/responses/resp_2")[0] == 404
    assert call(up.url, "/no/such/path")[0] == 404
    after = metric(up.url, "http_requests_total", handler="/v1/responses/{response_id}")
    assert after == before + 1
    assert metric(up.url, "http_requests_total", handler="none", status="4xx") >= 1
    assert metric(up.url, "http_requests_total", handler=C, method="POST", status="2xx") >= 1
    assert metric(up.url, "http_response_size_bytes_sum", handler=C) > 100
    assert metric(up.url, "http_request_size_bytes_sum", handler=C) > 10
    exposed = _exposed(up)
    for name in ("requests_total", "request_duration_seconds_bucket", "response_size_bytes_sum"):
        assert f"http_{name}" in exposed and f"vllm:http_{name}" not in exposed, name
    text = call(up.url, "/metrics")[1]
    assert 'handler="/metrics"' not in text and "no/such" not in text


def test_estimates_grow_with_the_work(up: Server) -> None:
    before = metric(up.url, "estimated_flops_per_gpu_total")
    assert before > 0
    call(up.url, C, {"prompt": "some more of it", "max_tokens": 20, "ignore_eos": True})
    eventually(lambda: metric(up.url, "estimated_flops_per_gpu_total") > before)


def test_a_span_reaches_the_collector(up: Server, collector: Collector) -> None:
    eventually(lambda: collector.spans, 15)
    resource, span = collector.spans[0]
    names = {a.key: a.value.string_value for a in resource.attributes}
    assert names["service.name"] == "jaxengine"
    assert span.trace_id.hex() == "c" * 32 and span.parent_span_id.hex() == "d" * 16
    found = {a.key: a.value for a in span.attributes}
    assert found["gen_ai.request.id"].string_value == "cmpl-mine"
    assert found["gen_ai.usage.completion_tokens"].int_value == 40
    assert found["gen_ai.latency.time_to_first_token"].double_value > 0


def test_what_the_log_says(up: Server) -> None:
    """The start-up table, and a line with its id for each request."""
    log = "\n".join(up.lines)
    for row in ("engines", "weights MiB", "KV blocks +24 of 16", "KV tokens +384", "programs"):
        assert re.search(rf"(?m)^ +{row}\b", log), (row, log)
    assert re.search(r"(?m)^ +start +\d+\.\d seconds$", log)
    assert re.search(r"jaxengine.access: mine POST /v1/completions 200 \d+ ms", log)


def test_no_traces_without_the_extra(tmp_path: pathlib.Path) -> None:
    """The command says what to install, before anything is loaded."""
    import subprocess
    import sys

    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry/__init__.py").write_text("")
    code = "from jaxengine.metrics.tracing import check_tracing as c; c('http://127.0.0.1:1')"
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1 and "needs the extra otel: pip install" in done.stderr
