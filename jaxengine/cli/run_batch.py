"""The run-batch command: a file of requests in OpenAI's batch format through an engine of its own.

A line in: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}.
A line out, in the same order: {"id", "custom_id", "response", "error"}. `response` is status_code,
request_id and body, also of what was refused; `error` tells of a line that is no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from starlette.types import ASGIApp

from jaxengine.cli.asgi import post
from jaxengine.cli.preflight import preflight
from jaxengine.config import EngineConfig
from jaxengine.wire import frames as wire

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_AHEAD = 4  # lines that may wait for an earlier one to end, for each that runs
_RETRY = 0.1  # seconds until the next try when the engine's queue is full


class _LineError(ValueError):
    """A line that is no request."""


def run_batch(
    config: EngineConfig,
    source: str,
    target: str,
    *,
    max_concurrency: int = 256,
    progress: bool = True,
    core: str = wire.DEFAULT_CORE,
) -> int:
    """Answer the lines of `source` into `target` ("-": standard input, output). 0 when every
    request was answered with a 2xx status, else 1. Raises ValueError for files that cannot be used
    or a model that cannot."""
    from jaxengine.cli.serve import setup_logging
    from jaxengine.server.run import uvicorn_loop

    if max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {max_concurrency}")
    if source != "-" and target != "-" and Path(source).resolve() == Path(target).resolve():
        raise ValueError(f"-i and -o are the same file: {source}")
    if core == wire.DEFAULT_CORE:
        preflight(config)
    setup_logging("warning" if config.server.log_level == "info" else config.server.log_level)
    with contextlib.ExitStack() as stack:
        try:
            lines: Iterable[bytes]
            if source == "-":
                counted = lines = sys.stdin.buffer.readlines()
            elif not Path(source).is_file():  # a pipe can be read once
                counted = lines = stack.enter_context(open(source, "rb")).readlines()
            else:
                counted = stack.enter_context(open(source, "rb"))
                lines = stack.enter_context(open(source, "rb"))
            total = sum(1 for line in counted if line.strip())
            out = sys.stdout.buffer if target == "-" else stack.enter_context(open(target, "wb"))
        except OSError as error:
            raise ValueError(f"cannot open {error.filename}: {error.strerror}") from None
        shown = total if progress else None
        with uvicorn_loop() as runner:
            done, failed = runner.run(_run(config, core, lines, out, max_concurrency, shown))
    print(f"run-batch: {done} requests, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


async def _run(
    config: EngineConfig,
    core: str,
    lines: Iterable[bytes],
    out: IO[bytes],
    concurrency: int,
    shown: int | None,
) -> tuple[int, int]:
    """`shown` is the length of the progress bar; None: no bar."""
    from tqdm import tqdm

    from jaxengine.front.async_llm import AsyncLLM, EngineStartError
    from jaxengine.metrics.tracing import Tracer
    from jaxengine.server.app import build_app
    from jaxengine.server.keys import keys_of

    try:
        engine = await AsyncLLM.start(config, core=core)
    except EngineStartError as error:
        raise ValueError(str(error)) from error
    try:
        if config.server.otlp_traces_endpoint is not None:
            engine.metrics.tracer = Tracer(config.server.otlp_traces_endpoint)
        app = build_app(engine, config)
        key = keys_of(config.server).api
        headers = {} if key is None else {"authorization": f"Bearer {key.decode('latin-1')}"}
        with tqdm(total=shown, unit="request", disable=shown is None, file=sys.stderr) as bar:
            return await _answer_all(app, headers, lines, out, concurrency, bar)
    finally:
        await engine.shutdown()


async def _answer_all(
    app: ASGIApp,
    headers: dict[str, str],
    lines: Iterable[bytes],
    out: IO[bytes],
    concurrency: int,
    bar: Any,
) -> tuple[int, int]:
    """(requests, failed ones). Results are written in order, as soon as all before are there."""
    room = asyncio.Semaphore(concurrency)
    running: deque[asyncio.Task[dict[str, Any]]] = deque()
    done = failed = 0

    async def answer(number: int, line: bytes) -> dict[str, Any]:
        async with room:
            return await _answer(app, headers, number, line)

    async def write_first() -> None:
        nonlocal done, failed
        result = await running.popleft()
        out.write(json.dumps(result, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        out.flush()
        done += 1
        failed += not _succeeded(result)
        bar.update()

    try:
        for number, line in _numbered(lines):
            running.append(asyncio.create_task(answer(number, line)))
            while running and (running[0].done() or len(running) >= concurrency * _AHEAD):
                await write_first()
            if number % 64 == 0:
                await asyncio.sleep(0)  # let what is read begin
        while running:
            await write_first()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return done, failed


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers, from 1; blank ones are passed over."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line


async def _answer(
    app: ASGIApp, headers: dict[str, str], number: int, line: bytes
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": None,
        "response": None,
        "error": None,
    }
    try:
        request = _parsed(number, line)
        result["custom_id"] = request.get("custom_id")
        url, body = _checked(number, request)
    except _LineError as error:
        result["error"] = {"code": "invalid_request", "message": str(error)}
        return result
    while True:
        answer = await post(app, url, body, headers)
        content = _content(answer.body)
        if answer.status != 503 or _code(content) != "overloaded":
            break
        await asyncio.sleep(_RETRY)
    result["response"] = {
        "status_code": answer.status,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": content,
    }
    return result


def _parsed(number: int, line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise _LineError(f"line {number} is not valid JSON: {error}") from None
    if not isinstance(request, dict):
        raise _LineError(f"line {number} must be a JSON object")
    return request


def _checked(number: int, request: dict[str, Any]) -> tuple[str, bytes]:
    """Where a request goes, and its body."""
    custom_id, url, body = request.get("custom_id"), request.get("url"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise _LineError(f"line {number}: custom_id must be a non-empty string")
    if request.get("method", "POST") != "POST":
        raise _LineError(f"line {number}: method must be POST, got {request['method']!r}")
    if url not in URLS:
        raise _LineError(f"line {number}: url must be one of {', '.join(URLS)}, got {url!r}")
    if not isinstance(body, dict):
        raise _LineError(f"line {number}: body must be a JSON object")
    for name in ("stream", "background"):
        if body.get(name):
            raise _LineError(f"line {number}: body.{name} is not possible in a batch")
    return url, json.dumps(body).encode()


def _content(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")


def _code(content: Any) -> Any:
    error = content.get("error") if isinstance(content, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _succeeded(result: dict[str, Any]) -> bool:
    response = result["response"]
    if response is None or not 200 <= response["status_code"] < 300:
        return False
    body = response["body"]
    return not (isinstance(body, dict) and body.get("status") == "failed")  # /v1/responses
