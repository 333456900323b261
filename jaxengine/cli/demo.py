"""`make demo`: start a server, stream one chat answer from it, show the speed, stop it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from jaxengine.lab.bench.http import ServerError, stream_json

QUESTION = "Explain in two sentences why the sky is blue."
_MARK = " at http://"  # of the line that serve prints when it is ready
_START_SECONDS = 600


def main() -> int:
    """Returns 0 when an answer came. The server is gone afterwards, whatever happened."""
    print("starting the server (the first start compiles; later ones are faster) ...", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "jaxengine.cli.main", "serve", "demo", "--port", "0"]
    command += ["--log-level", "warning", "--max-model-len", "2048"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(_START_SECONDS, server.kill)
    watchdog.start()
    try:
        assert server.stdout is not None
        url = _wait_ready(server.stdout)
        if url is None:
            print("the server did not start", file=sys.stderr)
            return 1
        print(f"ready after {time.monotonic() - began:.1f} s at {url}")
        return _ask(url)
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    finally:
        watchdog.cancel()
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
        print("server stopped")


def _wait_ready(lines: IO[str]) -> str | None:
    for line in lines:
        if _MARK in line:
            return "http://" + line.rsplit(_MARK, 1)[1].strip()
    return None


def _ask(url: str) -> int:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_completion_tokens": 120,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    for _ in stream_json(url, "/v1/chat/completions", {**body, "max_completion_tokens": 4}):
        continue
    print(f"first request, which compiles what is not cached: {time.monotonic() - began:.1f} s\n")
    print(f"> {QUESTION}")
    began = time.monotonic()
    first = 0.0
    tokens = 0
    for chunk in stream_json(url, "/v1/chat/completions", body):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            if text and not first:
                first = time.monotonic()
            print(text, end="", flush=True)
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    ended = time.monotonic()
    if tokens < 2 or not first:
        print("the answer is empty", file=sys.stderr)
        return 1
    print(
        f"\n\ntime to first token {first - began:.3f} s, {tokens} tokens, "
        f"{(tokens - 1) / max(ended - first, 1e-9):.1f} tokens/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
