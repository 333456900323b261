"""The periodic status line in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from jaxengine.metrics.prometheus import Metrics, Totals

log = logging.getLogger("jaxengine.status")

INTERVAL = 10.0  # seconds


def status_line(before: Totals, now: Totals, seconds: float) -> str:
    """Rates since `before`, gauges of `now`."""
    stats, old = now.stats, before.stats
    queries = stats.prefix_queries - old.prefix_queries
    hits = stats.prefix_hits - old.prefix_hits
    hit_rate = 100 * hits / queries if queries > 0 else 0.0
    return (
        f"prompt {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tok/s, "
        f"generation {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tok/s, "
        f"running {stats.num_running}, waiting {stats.num_waiting}, "
        f"KV {100 * stats.kv_usage:.1f}%, prefix hits {hit_rate:.1f}%, "
        f"preemptions {stats.num_preemptions}"
    )


async def log_status(metrics: Metrics, interval: float = INTERVAL) -> None:
    """Log a line every `interval` seconds until cancelled; silent after two idle ones."""
    idle = 2
    before, then = replace(metrics.totals), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        totals, now = replace(metrics.totals), time.monotonic()
        moved = (totals.prompt_tokens, totals.generation_tokens) != (
            before.prompt_tokens,
            before.generation_tokens,
        )
        busy = moved or totals.stats.num_running or totals.stats.num_waiting
        idle = 0 if busy else idle + 1
        if idle < 2:
            log.info(status_line(before, totals, now - then))
        before, then = totals, now
