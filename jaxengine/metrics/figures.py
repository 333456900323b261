"""Figures that an engine sends beside its stats (`EngineStats.extra`), as metric families.

Families that vLLM has too carry its names; a number inside a figure's name becomes a label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level

_SPEC = {
    "spec_num_drafts": ("spec_decode_num_drafts", "Rows that had drafts."),
    "spec_num_draft_tokens": ("spec_decode_num_draft_tokens", "Drafted tokens."),
    "spec_num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Drafts that were given out."),
    "spec_draft_seconds": ("spec_decode_draft_seconds", "Host seconds spent on drafting."),
    "kv_offload_external_queries": (
        "external_prefix_cache_queries",
        "Prompt tokens looked up in the tiers behind the device.",
    ),
    "kv_offload_external_hits": (
        "external_prefix_cache_hits",
        "Prompt tokens found in the tiers behind the device.",
    ),
    "kv_offload_allocation_failures": (
        "kv_offload_allocation_failure",
        "Stores for which host memory had no room.",
    ),
    "estimated_flops": (
        "estimated_flops_per_gpu",
        "Estimated FLOPs of all steps, on one device.",
    ),
    "estimated_read_bytes": (
        "estimated_read_bytes_per_gpu",
        "Estimated bytes of weights and KV read in all steps, on one device.",
    ),
    "estimated_write_bytes": (
        "estimated_write_bytes_per_gpu",
        "Estimated bytes of KV written in all steps, on one device.",
    ),
    "dp_waves": ("dp_waves", "Times that the coupled ranks began to work."),
    "dp_dummy_steps": ("dp_dummy_steps", "Steps without tokens, for the other ranks' sake."),
    "async_wasted_rows": (
        "async_wasted_rows",
        "Rows computed for sequences that had ended meanwhile.",
    ),
}
_NOW = re.compile(r"(?:_queue|_usage|_host_blocks|_in_flight|^warm)$")  # falls as well as rises


@dataclass(frozen=True)
class Figure:
    """Where a figure goes. A histogram's figure counts observations of `value`."""

    family: str
    kind: Kind
    text: str
    labels: Mapping[str, str] = field(default_factory=dict)
    value: float = 0.0


def place_figure(name: str) -> Figure:
    """The family for one name of `EngineStats.extra`. Counters unless the name says otherwise."""
    if name in _SPEC:
        return Figure(_SPEC[name][0], "counter", _SPEC[name][1])
    if match := re.fullmatch(r"spec_num_accepted_tokens_pos_(\d+)", name):
        text = "Accepted drafts by position."
        family = "spec_decode_num_accepted_tokens_per_pos"
        return Figure(family, "counter", text, {"position": match[1]})
    if match := re.fullmatch(r"spec_steps_k(\d+)", name):
        text = "Drafts a row that a decode step asked for."
        return Figure("dynamic_sd_k", "histogram", text, value=float(match[1]))
    if match := re.fullmatch(r"bucket_([a-z]+)_(\d+)_(\d+)", name):
        labels = {"kind": match[1], "tokens": match[2], "rows": match[3]}
        return Figure("bucket_steps", "counter", "Steps by the shape they ran in.", labels)
    if name == "dbo_steps" or name.startswith("dbo_off_"):
        ran = name == "dbo_steps"
        labels = {
            "outcome": "ran" if ran else "skipped",
            "reason": "" if ran else name.removeprefix("dbo_off_"),
        }
        return Figure("dbo_steps", "counter", "Steps as two microbatches, or why not.", labels)
    if name == "kv_fetch_in_progress":
        text = "Requests whose KV is being fetched from a tier behind the device."
        labels = {"stage": "in_progress"}
        return Figure("num_requests_kv_fetch_by_stage", "gauge", text, labels)
    if name == "kv_offload_host_usage":
        text = "Share of the host tier's blocks in use, 0 to 1."
        return Figure("cpu_cache_usage_perc", "gauge", text)
    clean = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    kind: Kind = "gauge" if _NOW.search(name) else "counter"
    return Figure(clean, kind, f"Engine figure {name}.")
