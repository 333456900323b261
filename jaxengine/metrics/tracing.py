"""OpenTelemetry traces: one span a request, with the attribute names of vLLM.

Needs the extra `otel`. Spans leave in the background, by OTLP over HTTP; a collector that is away
costs the spans, never a request.
"""

from __future__ import annotations

import os
import urllib.parse
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxengine.settings.tracing import check_tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# W3C headers of the HTTP request that the running task answers.
TRACE_HEADERS: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)
HEADER_NAMES = ("traceparent", "tracestate")

_FLUSH_MS = 3000


@dataclass(frozen=True)
class RequestSpan:
    """What is told of a request that ended. `arrival`: Unix seconds; the rest are seconds."""

    request_id: str
    model: str
    arrival: float
    headers: dict[str, str] | None
    n: int
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    temperature: float
    top_p: float
    max_tokens: int | None
    e2e: float
    queue: float = 0.0
    first_token: float | None = None  # from arrival; None: there was none
    prefill: float = 0.0
    decode: float = 0.0


def traces_url(endpoint: str) -> str:
    """The URL spans are posted to; a bare address gets the path that collectors listen on."""
    parts = urllib.parse.urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


class Tracer:
    """Makes spans of requests and sends them to a collector."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        """`exporter` takes the spans instead of the collector at `endpoint`. Raises ValueError
        without the extra otel."""
        check_tracing(endpoint)
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(traces_url(endpoint), timeout=5)
        name = os.environ.get("OTEL_SERVICE_NAME", "jaxengine")
        resource = Resource.create({"service.name": name})
        # A client's traceparent says what its span belongs to, not whether there is one; what
        # OTEL_TRACES_SAMPLER says is the operator's word.
        sampler = None if "OTEL_TRACES_SAMPLER" in os.environ else ALWAYS_ON
        self._provider = TracerProvider(sampler=sampler, resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxengine")

    def request_ended(self, request: RequestSpan) -> None:
        """Queue the request's span."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(request.headers or {})
        span = self._tracer.start_span(
            "llm_request",
            context=context,
            kind=SpanKind.SERVER,
            attributes=_attributes(request),
            start_time=int(request.arrival * 1e9),
        )
        if request.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(int((request.arrival + request.e2e) * 1e9))

    def close(self) -> None:
        """Send what is queued, within seconds."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def _attributes(request: RequestSpan) -> dict[str, Any]:
    found = {
        "gen_ai.response.model": request.model,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": request.n,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": request.completion_tokens,
        "gen_ai.usage.num_sequences": request.n,
        "gen_ai.response.finish_reason": request.finish_reason,
        "gen_ai.latency.e2e": request.e2e,
        "gen_ai.latency.time_in_queue": request.queue,
        "gen_ai.latency.time_to_first_token": request.first_token,
        "gen_ai.latency.time_in_model_prefill": request.prefill,
        "gen_ai.latency.time_in_model_decode": request.decode,
        "gen_ai.latency.time_in_model_inference": request.prefill + request.decode,
    }
    return {name: value for name, value in found.items() if value is not None}
