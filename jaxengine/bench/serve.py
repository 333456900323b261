"""`jaxengine bench serve`: load on a server's /v1/completions, and what a client sees of it.

TTFT: time to the first token. TPOT: time per output token after the first, a mean per request.
ITL: gaps between streamed events with text. E2EL: time to the end. All in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

_FIRST_ID, _LAST_ID = 1000, 20_000  # random prompts are token ids between these


@dataclass
class Trace:
    """What one request saw; times in seconds."""

    prompt_len: int
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None


def main(argv: list[str]) -> int:
    """Run the bench. Exit code 1 when a request failed."""
    args = _parser().parse_args(argv)
    with _stub_server(args) if args.stub else contextlib.nullcontext(args.base_url) as url:
        traces, seconds = asyncio.run(run_load(url, args))
    figures = summarize(traces, seconds)
    figures["settings"] = {k: v for k, v in vars(args).items() if k != "api_key"}
    _print(figures)
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if not figures["failed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxengine bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000")
    add("--stub", action="store_true", help="start a server with canned tokens and measure that")
    add("--model", default=None, help="default: the first that the server lists")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"))
    add("--num-prompts", type=_positive, default=100)
    add("--request-rate", type=float, default=float("inf"), help="a second, Poisson; inf = at once")
    add("--max-concurrency", type=_positive, default=None, help="requests under way at most")
    add("--random-input-len", type=_positive, default=128)
    add("--random-output-len", type=_positive, default=64)
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=600.0, help="seconds for one request")
    add("--output-json", default=None)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


@contextlib.contextmanager
def _stub_server(args: argparse.Namespace) -> Iterator[str]:
    command = [sys.executable, "-m", "jaxengine.cli.main", "serve", "--stub", "--port", "0"]
    longest = args.random_input_len + args.random_output_len + 1
    command += ["--max-model-len", str(max(longest, 512)), "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next((x for x in process.stdout if " at http://" in x), "")
            if not line:
                raise RuntimeError("the stub server did not start")
            yield "http://" + line.split(" at http://")[1].strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


async def run_load(url: str, args: argparse.Namespace) -> tuple[list[Trace], float]:
    """Every request's trace, and the seconds from the first start to the last end."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    async with aiohttp.ClientSession(
        url, headers=headers, connector=connector, timeout=timeout, read_bufsize=2**20
    ) as session:
        model = args.model or await _first_model(session)
        rng = random.Random(args.seed)
        prompts = [
            [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(args.random_input_len)]
            for _ in range(args.num_prompts)
        ]
        gate = asyncio.Semaphore(args.max_concurrency or args.num_prompts)
        began = time.perf_counter()
        tasks: list[asyncio.Task[Trace]] = []
        async for prompt in _paced(prompts, args.request_rate, rng):
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": args.random_output_len,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            tasks.append(asyncio.create_task(_one(session, gate, body)))
        traces = await asyncio.gather(*tasks)
        return traces, time.perf_counter() - began


async def _first_model(session: aiohttp.ClientSession) -> str:
    async with session.get("/v1/models") as answer:
        answer.raise_for_status()
        return str((await answer.json())["data"][0]["id"])


async def _paced(
    prompts: list[list[int]], rate: float, rng: random.Random
) -> AsyncIterator[list[int]]:
    """The prompts at the times of a Poisson process (on schedule, however late the loop is)."""
    due = time.perf_counter()
    for prompt in prompts:
        if rate != float("inf"):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += rng.expovariate(rate)
        yield prompt


async def _one(
    session: aiohttp.ClientSession, gate: asyncio.Semaphore, body: dict[str, Any]
) -> Trace:
    trace = Trace(len(body["prompt"]))
    async with gate:
        trace.started = time.perf_counter()
        try:
            async with session.post("/v1/completions", json=body) as answer:
                if answer.status != 200:
                    trace.error = f"HTTP {answer.status}: {(await answer.text())[:200]}"
                else:
                    await _read(answer, trace)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            trace.error = f"{type(error).__name__}: {error}"
        trace.ended = time.perf_counter()
    return trace


async def _read(answer: aiohttp.ClientResponse, trace: Trace) -> None:
    last = 0.0
    async for line in answer.content:
        now = time.perf_counter()
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            trace.error = str(chunk["error"].get("message"))
        if chunk.get("usage"):
            trace.num_tokens = chunk["usage"]["completion_tokens"]
        if chunk.get("choices"):
            if not trace.first:
                trace.first = now
            else:
                trace.gaps.append(now - last)
            last = now
    if not trace.first and trace.error is None:
        trace.error = "the stream ended without a token"


def summarize(traces: list[Trace], seconds: float) -> dict[str, Any]:
    """Totals, and percentiles in milliseconds."""
    good = [t for t in traces if t.error is None]
    tokens = sum(t.num_tokens for t in good)
    samples = {
        "ttft_ms": [t.first - t.started for t in good],
        "tpot_ms": [(t.ended - t.first) / (t.num_tokens - 1) for t in good if t.num_tokens > 1],
        "itl_ms": [gap for t in good for gap in t.gaps],
        "e2el_ms": [t.ended - t.started for t in good],
    }
    return {
        "completed": len(good),
        "failed": len(traces) - len(good),
        "errors": sorted({t.error for t in traces if t.error is not None})[:5],
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "total_tokens_per_s": (tokens + sum(t.prompt_len for t in good)) / seconds,
        "input_tokens": sum(t.prompt_len for t in good),
        "output_tokens": tokens,
        "latency": {name: _spread(values) for name, values in samples.items()},
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = 1e3 * np.asarray(seconds)
    return {"mean": float(values.mean())} | {
        f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)
    }


def _print(figures: dict[str, Any]) -> None:
    print(f"{figures['completed']} requests in {figures['seconds']:.2f} s", end="")
    print(f", {figures['failed']} failed" if figures["failed"] else "")
    for error in figures["errors"]:
        print(f"  {error}")
    print(
        f"{figures['requests_per_s']:.1f} requests/s, {figures['output_tokens_per_s']:.0f} output "
        f"tokens/s, {figures['total_tokens_per_s']:.0f} tokens/s in all"
    )
    print(f"{'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, row in figures["latency"].items():
        cells = "".join(f"{value:>10.2f}" for value in row.values())
        print(f"{name.removesuffix('_ms').upper():<6}{cells}")
