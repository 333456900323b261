"""Requests of a benchmark: lengths, arrival times, and which prompts begin alike.

Arrivals follow a gamma process (burstiness 1 is Poisson, smaller is burstier); traces are read
from JSON lines (timestamp, input_length, output_length, hash_ids, session) or CSV (Azure's and
BurstGPT's columns). A trace has no text: `prompt_tokens` makes up tokens in which equal block ids
after equal prefixes give equal tokens.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

FIRST_ID, LAST_ID = 1000, 20_000  # made-up tokens are between these: ordinary ones everywhere


@dataclass(frozen=True)
class BenchRequest:
    """One request of a benchmark.

    arrival: seconds from the start; with a session, from the start of the session, and not before
    the request before it in the session was answered.
    prompt: token ids or text; empty for a trace, see `prompt_tokens`.
    prompt_len, output_len: tokens.
    block_ids: ids of the prompt's leading blocks of `block_size` tokens; equal ids are equal
    blocks after equal prefixes.
    """

    arrival: float
    prompt: tuple[int, ...] | str
    prompt_len: int
    output_len: int
    session: str | None = None
    block_size: int = 0
    block_ids: tuple[int, ...] = ()


def arrivals(n: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Arrival times in seconds of n requests, the first at 0: gaps from a gamma distribution of
    shape `burstiness` and mean 1 / rate. At an infinite rate all arrive at once.

    Raises ValueError when rate or burstiness is not above 0.
    """
    return arrivals_at([rate] * n, burstiness, seed)


def arrivals_at(rates: Sequence[float], burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """As `arrivals`, with a rate for each request: that of the gap behind it."""
    if not all(rate > 0 for rate in rates) or not burstiness > 0:
        raise ValueError(f"rate and burstiness must be above 0, got {min(rates)} and {burstiness}")
    rng = np.random.default_rng([seed, 1])
    means = 1 / np.asarray(rates, np.float64)[:-1]  # 0 at an infinite rate
    gaps = rng.gamma(burstiness, 1 / burstiness, len(means)) * means
    return [0.0, *np.cumsum(gaps).tolist()][: len(rates)]


def ramp(n: int, start: float, end: float, strategy: str) -> list[float]:
    """Rates of n requests from `start` to `end`, in equal steps ("linear") or equal factors
    ("exponential")."""
    along = np.linspace(0, 1, n)
    rates = (
        start + (end - start) * along if strategy == "linear" else start * (end / start) ** along
    )
    return rates.tolist()


def with_arrivals(requests: Sequence[BenchRequest], times: Sequence[float]) -> list[BenchRequest]:
    """The requests at other times."""
    return [
        dataclasses.replace(request, arrival=time)
        for request, time in zip(requests, times, strict=True)
    ]


def prompt_tokens(
    request: BenchRequest, seed: int = 0, first: int = FIRST_ID, last: int = LAST_ID
) -> tuple[int, ...]:
    """The request's prompt as token ids from `first` to `last`.

    Blocks of a trace come from their ids and the seed alone; tokens behind the last block from
    the request itself, so that they are the same in every run and shared with no other prompt.
    """
    if isinstance(request.prompt, str):
        raise ValueError("the prompt is text")
    if request.prompt or not request.prompt_len:
        return request.prompt
    parts = [
        np.random.default_rng([seed, 2, i]).integers(first, last + 1, request.block_size)
        for i in request.block_ids
    ]
    rest = request.prompt_len - len(parts) * request.block_size
    if rest > 0:
        own = (request.arrival, request.session, request.prompt_len, request.output_len)
        rng = np.random.default_rng([seed, 3, zlib.crc32(repr(own).encode())])
        parts.append(rng.integers(first, last + 1, rest))
    return tuple(np.concatenate(parts)[: request.prompt_len].tolist())


def load_trace(path: str | Path, block_size: int | None = None) -> list[BenchRequest]:
    """Requests of a trace, by arrival (then session, then order in the file). The first one of
    a trace without sessions arrives at 0.

    JSON lines hold `timestamp` in milliseconds; block ids are of `block_size` tokens, default:
    the power of two that fits all lengths. Raises ValueError naming the file and row.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no trace {path}")
    rows = list(_read_csv(path) if path.suffix == ".csv" else _read_jsonl(path))
    if not rows:
        raise ValueError(f"{path} holds no request")
    hashed = [(r.prompt_len, len(r.block_ids)) for r in rows if r.block_ids]
    size = (block_size or _block_size(path, hashed)) if hashed else 0
    if all(r.session is None for r in rows):
        start = min(r.arrival for r in rows)
        rows = [dataclasses.replace(r, arrival=r.arrival - start) for r in rows]
    rows.sort(key=lambda r: r.arrival)  # stable: equal times stay in the file's order
    return [dataclasses.replace(r, block_size=size if r.block_ids else 0) for r in rows]


def _block_size(path: Path, hashed: Sequence[tuple[int, int]]) -> int:
    for size in (2**k for k in range(13)):
        if all(count in (length // size, -(-length // size)) for length, count in hashed):
            return size
    raise ValueError(f"{path}: hash_ids and input_length fit no block size")


def _read_jsonl(path: Path) -> Iterator[BenchRequest]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            session = row.get("session")
            yield _request(
                float(row["timestamp"]) / 1000,
                row["input_length"],
                row["output_length"],
                None if session is None else str(session),
                tuple(int(i) for i in row.get("hash_ids") or ()),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: {_why(error)}") from None


# Columns of the published CSV traces: arrival, prompt tokens, output tokens.
_COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
)


def _read_csv(path: Path) -> Iterator[BenchRequest]:
    with path.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        header = table.fieldnames or []
        names = next((c for c in _COLUMNS if set(c) <= set(header)), None)
        if names is None:
            wanted = " or ".join(", ".join(c) for c in _COLUMNS)
            raise ValueError(f"{path}: its columns must include {wanted}")
        for number, row in enumerate(table, 2):
            when, prompt, output = (row[name] for name in names)
            try:
                yield _request(_seconds(when), prompt, output, None, ())
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {_why(error)}") from None


def _seconds(text: str) -> float:
    """A number of seconds, or a date with a time."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text + "+00:00").timestamp()


def _request(
    arrival: float, prompt: Any, output: Any, session: str | None, ids: tuple[int, ...]
) -> BenchRequest:
    length, out = int(prompt), int(output)
    if length < 1 or out < 0 or not math.isfinite(arrival):
        raise ValueError(f"time {arrival} s, {length} prompt and {out} output tokens make no sense")
    return BenchRequest(arrival, (), length, max(1, out), session, 0, ids)


def _why(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
