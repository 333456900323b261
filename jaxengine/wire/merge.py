"""Several engines seen as one: sizes, stats, answers of calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from jaxengine.wire.messages import EngineReady, EngineStats


def merge_ready(parts: list[EngineReady]) -> EngineReady:
    """Blocks add up; a limit is the lowest of all. Raises ValueError when vocabularies differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({p.vocab_size for p in parts}) > 1:
        sizes = ", ".join(str(p.vocab_size) for p in parts)
        raise ValueError(f"the ranks serve different models: vocabularies of {sizes} tokens")
    return msgspec.structs.replace(
        first,
        max_model_len=min(p.max_model_len for p in parts),
        num_blocks=sum(p.num_blocks for p in parts),
    )


def merge_stats(parts: Collection[EngineStats]) -> EngineStats:
    """Sums; usage is the share of all ranks' blocks, the depth is the lowest."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    values: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        if name not in ("extra", "block_seconds"):
            values[name] = sum(getattr(p, name) for p in parts)
    blocks = values["num_blocks"]
    values["kv_usage"] = sum(p.kv_usage * p.num_blocks for p in parts) / blocks if blocks else 0.0
    values["pipeline_depth"] = min((p.pipeline_depth for p in parts), default=1)
    extra: dict[str, float] = {}
    for part in parts:
        for name, value in part.extra.items():
            extra[name] = extra.get(name, 0.0) + value
    return EngineStats(**values, extra=extra)


def merge_results(results: list[Any]) -> Any:
    """Of one call on every rank: True when all say so, the one answer when all give the same,
    else the list, in order of rank."""
    if all(isinstance(r, bool) for r in results):
        return all(results)
    first = results[0]
    return first if all(r == first for r in results) else results
