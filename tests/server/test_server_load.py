"""Many clients at once, on the demo model: nothing is lost, nothing grows, nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import pytest
from serverlib import Server, alive, call, eventually, metric, running

from jaxengine.wire.frames import DEFAULT_CORE

C, CC = "/v1/completions", "/v1/chat/completions"
CLIENTS = 200
SECONDS = float(os.environ.get("JAXENGINE_TEST_LOAD_SECONDS", "60"))
TIMEOUT = aiohttp.ClientTimeout(total=240)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    # compiling beside 200 clients would be what is measured
    with running("--warmup", "full", "--log-level", "warning", core=DEFAULT_CORE) as server:
        yield server
        assert alive(server.url)


@dataclass
class Figures:
    requests: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token
    health: list[float] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)  # (seconds since the start, bytes)


def _body(path: str, number: int, tokens: int, **more: Any) -> dict[str, Any]:
    text = f"Client {number} says hello, and "
    what = {"prompt": text} if path == C else {"messages": [{"role": "user", "content": text}]}
    usage = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return {**what, **usage, "max_tokens": tokens, "ignore_eos": True, **more}


async def _stream(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any], figures: Figures | None = None
) -> int:
    """Tokens of one whole stream, after checks that none is missing."""
    began, seen, used, ends = time.monotonic(), 0, -1, []
    async with session.post(path, json=body, timeout=TIMEOUT) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            assert b'"error"' not in line, line
            if line == b"data: [DONE]\n":
                ends.append("[DONE]")
                continue
            chunk = json.loads(line[6:])
            if chunk["choices"]:
                new = chunk["choices"][0].get("token_ids") or []
                if new and not seen and figures is not None:
                    figures.first.append(time.monotonic() - began)
                seen += len(new)
                if chunk["choices"][0]["finish_reason"]:
                    ends.append(chunk["choices"][0]["finish_reason"])
            if chunk.get("usage"):
                used = chunk["usage"]["completion_tokens"]
    assert seen == used == body["max_tokens"], (seen, used, body)
    assert ends == ["length", "[DONE]"], ends
    return seen


async def _client(
    session: aiohttp.ClientSession, number: int, until: float, figures: Figures
) -> None:
    path, numbers = (C, CC)[number % 2], random.Random(number)
    while time.monotonic() < until:
        body = _body(path, number, numbers.randint(4, 8), seed=numbers.randrange(2**32))
        tokens = await _stream(session, path, body, figures)
        figures.tokens += tokens
        figures.requests += 1


async def _watch(
    session: aiohttp.ClientSession, front: psutil.Process, until: float, figures: Figures
) -> None:
    started = time.monotonic()
    while time.monotonic() < until:
        began = time.monotonic()
        async with session.get("/health") as answer:
            assert answer.status == 200
        figures.health.append(time.monotonic() - began)
        figures.rss.append((time.monotonic() - started, front.memory_info().rss))
        await asyncio.sleep(0.25)


def _idle(url: str) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(metric(url, name) == 0 for name in names)


def _session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))


async def test_200_streams_for_a_minute(up: Server) -> None:
    """B46, B47: every token arrives, /health stays quick, the front does not grow."""
    figures = Figures()
    front = psutil.Process(up.process.pid)
    finished = metric(up.url, "request_success_total", finished_reason="length")
    made = metric(up.url, "generation_tokens_total")
    async with _session(up.url) as session:
        until = time.monotonic() + SECONDS
        clients = [_client(session, i, until, figures) for i in range(CLIENTS)]
        await asyncio.gather(_watch(session, front, until, figures), *clients)
    await asyncio.to_thread(eventually, lambda: _idle(up.url), 2)
    early = [rss for at, rss in figures.rss if SECONDS / 3 <= at < SECONDS / 2]
    late = [rss for at, rss in figures.rss if at >= 5 * SECONDS / 6]
    growth = statistics.median(late) / statistics.median(early) - 1
    health = sorted(figures.health)
    p99 = health[int(0.99 * (len(health) - 1))]
    print(
        f"\n{figures.requests} requests, {figures.tokens / SECONDS:.0f} tokens/s, first token "
        f"p50 {statistics.median(figures.first):.2f} s, max {max(figures.first):.2f} s; /health "
        f"p50 {statistics.median(health):.3f} s, p99 {p99:.3f} s; front "
        f"{statistics.median(early) / 2**20:.0f} MiB, grew {100 * growth:.1f} %"
    )
    assert figures.requests >= CLIENTS
    ended = metric(up.url, "request_success_total", finished_reason="length") - finished
    assert ended == figures.requests
    assert metric(up.url, "generation_tokens_total") - made == figures.tokens
    assert growth < 0.05
    assert p99 < 1
    assert alive(up.url)


async def test_100_of_200_clients_go_at_once(up: Server) -> None:
    """Their blocks are back within a second, however long a step takes; the other 100 miss
    nothing."""
    aborted = metric(up.url, "request_success_total", finished_reason="abort")
    info = call(up.url, "/server_info")[1]["engine"]
    blocks, size = info["num_blocks"], info["block_size"]

    def used() -> float:
        return metric(up.url, "kv_cache_usage_perc") * blocks

    async def slowly(session: aiohttp.ClientSession, number: int) -> None:
        prompt = [1000 + number, *range(1000, 1127)]  # 8 blocks that no other shares
        await _stream(session, C, _body(C, number, 1500) | {"prompt": prompt})

    async with _session(up.url) as session:
        leaving = [asyncio.create_task(slowly(session, i)) for i in range(CLIENTS // 2)]
        while metric(up.url, "num_requests_running") + metric(up.url, "num_requests_waiting") < 100:
            await asyncio.sleep(0.1)
        while used() < 64 * 8:  # the prompts are in; the others wait: max_num_seqs is 64
            await asyncio.sleep(0.1)
        bodies = [_body(C, i, 4 + i % 5) | {"prompt": [900 + i, 5]} for i in range(CLIENTS // 2)]
        staying = [asyncio.create_task(_stream(session, C, body)) for body in bodies]
        steps = metric(up.url, "engine_steps_total")
        await asyncio.sleep(3)
        step = 3 / max(1, metric(up.url, "engine_steps_total") - steps)
        before = used()
        began = time.monotonic()
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        # what stays has at most 2 blocks a sequence
        await asyncio.to_thread(
            eventually,
            lambda: (
                used() <= 64 * 2
                and metric(up.url, "num_requests_running") + metric(up.url, "num_requests_waiting")
                <= CLIENTS // 2
            ),
            1,
        )
        spent = time.monotonic() - began
        counts = await asyncio.gather(*staying)
    print(
        f"\n{before:.0f} of {blocks} blocks of {size} were in use; back after {spent:.2f} s, "
        f"with steps of {step:.2f} s"
    )
    assert counts == [body["max_tokens"] for body in bodies]
    await asyncio.to_thread(eventually, lambda: _idle(up.url), 2)
    ended = metric(up.url, "request_success_total", finished_reason="abort") - aborted
    assert ended == CLIENTS // 2
    assert alive(up.url)
