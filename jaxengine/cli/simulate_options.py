"""The flags of `jaxengine simulate`, as dataclasses: a field is a flag."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cyclopts import Parameter


@dataclass(frozen=True)
class Workload:
    dataset_name: Literal["random", "prefix_repetition", "trace"] = "random"
    """Made-up prompts, made-up prompts that share prefixes, or the requests of --dataset-path."""
    dataset_path: str | None = None
    """A trace (.jsonl or .csv); means --dataset-name trace."""
    num_prompts: int | None = None
    """Requests; default 1000, or all of a trace."""
    request_rate: float = float("inf")
    """Requests a second; inf: all at once. A trace has arrivals of its own."""
    burstiness: float = 1.0
    """Shape of the gaps' gamma distribution; 1 is Poisson, less is burstier."""
    speed: float = 1.0
    """Arrivals come so many times as fast."""
    max_concurrency: int | None = None
    """Most requests under way at once, as a client with so many connections sends them."""
    random_input_len: int = 1024
    """Prompt tokens."""
    random_output_len: int = 128
    """Output tokens."""
    random_range_ratio: float = 0.0
    """Lengths are uniform within this share of the given ones."""
    prefix_repetition_prefix_len: int = 256
    """Tokens of a shared prefix."""
    prefix_repetition_suffix_len: int = 256
    """Tokens of a prompt's own."""
    prefix_repetition_num_prefixes: int = 10
    """Different prefixes."""
    prefix_repetition_output_len: int = 128
    """Output tokens."""
    seed: int = 0
    """Of lengths, arrivals and tokens."""


@dataclass(frozen=True)
class Hardware:
    table: str | None = None
    """Measured step times, as --calibrate writes them."""
    device: str | None = None
    """Roofline of a GPU: h100, h200, a100, b200 or l40s; needs MODEL."""
    tensor_parallel_size: int = 1
    """GPUs of a rank, each with a share of every layer."""
    enable_expert_parallel: bool = False
    """Divide experts, not their columns, over a rank's GPUs."""
    dtype: str = "bfloat16"
    """Of weights and products on a GPU: bfloat16, float8, int8 or float32."""
    efficiency: float = 0.7
    """Share of the GPU's peak arithmetic that is reached (assumed)."""
    memory_efficiency: float = 0.8
    """Share of the GPU's peak bandwidth that is reached (assumed)."""
    host_us: float = 2000.0
    """Microseconds of the host for a step (assumed, with a GPU)."""
    host_row_us: float = 14.0
    """Microseconds of the host for a row of a step (assumed, with a GPU)."""


@dataclass(frozen=True)
class Engine:
    ranks: int = 1
    """Engines behind the balancer, 1 to 4096."""
    data_parallel_affinity: Literal["none", "prefix", "session"] = "none"
    """What the balancer keeps together."""
    max_num_seqs: int | None = None
    """Most sequences in one step; default 256, or the table's."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; default 8192, or the table's."""
    max_model_len: int | None = None
    """Longest sequence; default: the longest request, or the table's."""
    block_size: int | None = None
    """Tokens in one KV block; default 64, or the table's."""
    num_kv_blocks: int | None = None
    """Blocks of a rank's pool; default: what the GPU's memory holds, or the table's."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal prefixes."""
    async_scheduling: bool = True
    """Two steps in flight."""
    cpu_offload_gib: float = 0.0
    """Host memory of a rank for KV blocks; 0 = none."""
    policy: Literal["lru", "arc"] = "lru"
    """Which block leaves host memory."""


@dataclass(frozen=True)
class Search:
    slo: Annotated[list[str], Parameter(consume_multiple=True, negative=())] = field(
        default_factory=list
    )
    """Service levels, as ttft:2000 tpot:100 (milliseconds; ttft, tpot, itl, e2el): goodput counts
    requests that keep them."""
    slo_percentile: int = 90
    """Of requests that must keep the levels: 50, 90 or 99."""
    find_limit: Annotated[bool, Parameter(negative=())] = False
    """Raise the rate until a level fails, and name what breaks first."""


@Parameter(name="*")
@dataclass(frozen=True)
class SimulateOptions:
    """All flags of a simulation."""

    workload: Annotated[Workload, Parameter(name="*", group="Workload")] = field(
        default_factory=Workload
    )
    hardware: Annotated[Hardware, Parameter(name="*", group="Device")] = field(
        default_factory=Hardware
    )
    engine: Annotated[Engine, Parameter(name="*", group="Engine")] = field(default_factory=Engine)
    search: Annotated[Search, Parameter(name="*", group="Service levels")] = field(
        default_factory=Search
    )
