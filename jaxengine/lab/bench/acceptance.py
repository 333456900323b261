"""Speculative decoding during a load, from the counters on the server's /metrics before and after.

Ours and vLLM's have the same names but for the prefix, and the results carry the names of
`vllm bench serve`.
"""

from __future__ import annotations

import asyncio
import collections
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_PREFIXES = ("jaxengine:spec_decode_num_", "vllm:spec_decode_num_")
_SECONDS = 5.0  # for one look at /metrics
_PAUSE = 0.4  # between looks: our engines send their counters every quarter of a second
_LOOKS = 5


@dataclass(frozen=True)
class Drafts:
    """Counters of all engines together: rows with drafts, drafted tokens, accepted ones, and these
    by position, from 0."""

    drafts: float = 0
    draft_tokens: float = 0
    accepted: float = 0
    per_position: dict[int, float] = field(default_factory=dict)


def parse_drafts(text: str) -> Drafts | None:
    """The counters in a page of metrics; None where it has none, or is no such page."""
    found: dict[str, dict[str, float]] = {prefix: {} for prefix in _PREFIXES}
    by_position: dict[str, dict[int, float]] = {
        prefix: collections.defaultdict(float) for prefix in _PREFIXES
    }
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                for prefix in _PREFIXES:
                    name = sample.name.removeprefix(prefix).removesuffix("_total")
                    if not sample.name.startswith(prefix) or sample.name.endswith("_created"):
                        continue
                    if name == "accepted_tokens_per_pos":
                        position = int(sample.labels["position"])
                        by_position[prefix][position] += sample.value
                    else:
                        found[prefix][name] = found[prefix].get(name, 0) + sample.value
    except (ValueError, KeyError):
        return None
    for prefix in _PREFIXES:  # a page may have both names for one thing
        counts = found[prefix]
        if counts:
            return Drafts(
                counts.get("drafts", 0),
                counts.get("draft_tokens", 0),
                counts.get("accepted_tokens", 0),
                dict(by_position[prefix]),
            )
    return None


async def read_drafts(session: aiohttp.ClientSession, url: str) -> Drafts | None:
    """The counters of the server at `url` once they stand still, as they follow the tokens a
    little later; None where there are none."""
    last = await _look(session, url)
    for _ in range(_LOOKS):
        if last is None:
            return None
        await asyncio.sleep(_PAUSE)
        again = await _look(session, url)
        if again == last:
            return last
        last = again
    return last


async def _look(session: aiohttp.ClientSession, url: str) -> Drafts | None:
    try:
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with session.get(url + "/metrics", timeout=timeout) as answer:
            return parse_drafts(await answer.text()) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return None


def acceptance(before: Drafts | None, after: Drafts | None) -> dict[str, Any]:
    """The figures of what came between; empty when nothing was drafted.

    The rate is in percent of the drafted tokens; the length is that of a step that had drafts,
    with the token that is the model's own; per position it is a share of all drafts.
    """
    if after is None:
        return {}
    first = before or Drafts()
    drafts, tokens = after.drafts - first.drafts, after.draft_tokens - first.draft_tokens
    accepted = after.accepted - first.accepted
    if drafts <= 0 or tokens <= 0 or accepted < 0:  # none, or the server began anew meanwhile
        return {}
    gained = {at: n - first.per_position.get(at, 0) for at, n in after.per_position.items()}
    positions = range(max(gained, default=-1) + 1)
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            gained.get(at, 0) / drafts for at in positions
        ],
    }


def acceptance_lines(figures: dict[str, Any]) -> list[str]:
    """Lines for a terminal; none without such figures."""
    if "spec_decode_acceptance_rate" not in figures:
        return []
    shares = figures["spec_decode_per_position_acceptance_rates"]
    return [
        f"speculation: {figures['spec_decode_acceptance_rate']:.1f} % of "
        f"{figures['spec_decode_draft_tokens']} drafted tokens accepted, "
        f"{figures['spec_decode_acceptance_length']:.2f} tokens a step with drafts",
        "  accepted by position: " + " ".join(f"{share:.1%}" for share in shares),
    ]
