"""The setting `otlp_traces_endpoint`."""

from __future__ import annotations

import importlib.util
import urllib.parse


def check_tracing(endpoint: str | None) -> None:
    """Raises ValueError when traces are asked for and cannot be sent."""
    if endpoint is None:
        return
    if urllib.parse.urlsplit(endpoint).scheme not in ("http", "https"):
        raise ValueError(f"--otlp-traces-endpoint must be an http(s) URL, got {endpoint!r}")
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ValueError(
                "--otlp-traces-endpoint needs the extra otel: pip install 'jaxengine[otel]'"
            )
