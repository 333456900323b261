"""Load on a server: requests at their times, not more at once than allowed, sessions in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp

from jaxengine.lab.bench.client import Api, Trace, body_of, send
from jaxengine.lab.bench.datasets import BenchRequest


async def run_load(
    session: aiohttp.ClientSession,
    api: Api,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int | None = None,
    seed: int = 0,
) -> tuple[list[Trace], float]:
    """A trace for each request, in their order, and the seconds from the start to the last end.

    A request is sent at its arrival (on schedule, however late the loop is), one of a session
    also not before the one before it has ended. `max_concurrency` holds back those beyond it.
    """
    traces = [Trace(request.prompt_len) for request in requests]
    # Bodies are made before the clock runs: making text takes time of the loop.
    bodies = [body_of(api, r, seed) for r in requests]
    gate = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    chains: dict[object, list[int]] = {}
    for at, request in enumerate(requests):
        chains.setdefault(at if request.session is None else request.session, []).append(at)
    began = time.perf_counter()

    async def follow(chain: list[int]) -> None:
        for at in chain:
            due = began + requests[at].arrival
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            traces[at].due = max(due, time.perf_counter() if len(chain) > 1 else due)
            async with gate:
                await send(session, api, bodies[at], traces[at])

    await asyncio.gather(*(follow(chain) for chain in chains.values()))
    return traces, time.perf_counter() - began


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server lists."""
    async with session.get(url + "/v1/models") as answer:
        answer.raise_for_status()
        return str((await answer.json())["data"][0]["id"])


async def wait_ready(session: aiohttp.ClientSession, url: str, seconds: float) -> None:
    """Until the server lists its models. Raises ValueError when it does not in so many seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            async with session.get(url + "/v1/models") as answer:
                last = f"HTTP {answer.status}"
                if answer.status < 500:
                    return
        except aiohttp.ClientError as error:
            last = str(error)
        if time.monotonic() >= end:
            raise ValueError(f"no server is ready after {seconds:g} s: {last}")
        await asyncio.sleep(0.2)
