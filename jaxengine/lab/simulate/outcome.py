"""What a simulated run was like: every request, and every rank's figures."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """One request; times in virtual seconds from the start of the run."""

    prompt_len: int
    output_len: int
    arrival: float = 0.0  # when its client sent it
    scheduled: float = -1.0  # in its first step; -1 = never
    rank: int = -1
    times: array[float] = field(default_factory=lambda: array("d"))  # of output tokens
    cached: int = 0  # prompt tokens found on the device or in host memory
    preemptions: int = 0
    error: str | None = None


@dataclass
class RankFigures:
    """Sums of one rank. Seconds are virtual."""

    steps: int = 0
    tokens: int = 0  # fed to the device, prefill and decode
    rows: int = 0
    device_s: float = 0.0
    host_s: float = 0.0
    starved_s: float = 0.0  # the device waited for the host although there was work
    requests: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    host_hits: int = 0  # tokens loaded from host memory
    loaded_bytes: int = 0
    stored_bytes: int = 0
    kv_peak: float = 0.0  # share of blocks owned
    kv_sum: float = 0.0  # over steps
    kv_end: float = 0.0  # share of blocks owned when all was over
    most_waiting: int = 0
    # Steps in which somebody waited, by what was in the way: see `rank.obstacle`.
    obstacles: Counter[str] = field(default_factory=Counter)
    bounds: dict[str, float] = field(default_factory=dict)  # device seconds by what binds them


@dataclass(frozen=True)
class Outcome:
    """A run. `seconds`: from the first arrival to the last end."""

    records: list[Record]
    ranks: list[RankFigures]
    seconds: float
    max_num_seqs: int
