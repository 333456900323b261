"""Step times measured on this machine, as a table: the `CostModel` of a real engine.

Compiled shapes decide most of a step's time, so every one has its own constant; what depends on
contexts is linear in the work that the attention loops really do. `calibrate` measures, `fit`
makes the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.lab.simulate.cost import StepCost, StepShape
from jaxengine.sched.batch import Bucket
from jaxengine.sched.buckets import all_buckets, choose, row_buckets
from jaxengine.sched.config import GroupSpec, SchedulerSizes

FORMAT = 1
QUERIES = 128  # queries of one work item of prefill attention (`pallas_kernels.paged_attention`)
CHUNK = 128  # context tokens of a loop turn


@dataclass(frozen=True)
class Work:
    """What a step's time is linear in, beside its bucket's constant."""

    decode_tokens: int  # context of decode rows, as the loops go: turns of rows, whole chunks
    prefill_pairs: int  # queries times keys, in whole items and chunks
    sampler_rows: int  # of a mixed step; a decode bucket has its own number

    @staticmethod
    def of(shape: StepShape, bucket: Bucket, rows_per_turn: int, sampler: int) -> Work:
        chunks = -(-shape.contexts // CHUNK) * CHUNK
        step = rows_per_turn if 0 < rows_per_turn < bucket.rows else bucket.rows
        padded = np.pad(chunks, (0, -len(chunks) % step)).reshape(-1, step)
        pairs = 0
        for start, count in zip(shape.starts.tolist(), shape.counts.tolist(), strict=True):
            ends = np.minimum(np.arange(QUERIES, count + QUERIES, QUERIES), count) + start
            pairs += int((-(-ends // CHUNK) * CHUNK).sum()) * QUERIES
        rows = 0 if bucket.decode_only else sampler
        return Work(int(padded.max(axis=1, initial=0).sum()) * step, pairs, rows)


@dataclass(frozen=True)
class Sample:
    """A measured step. Seconds."""

    bucket_tokens: int
    decode_only: bool
    rows: int
    prefill_rows: int
    prefill_tokens: int
    work: Work
    plan_s: float
    device_s: float
    finish_s: float
    exact: bool = True  # False: the device's time is no more than about right


@dataclass(frozen=True)
class Table:
    """Seconds. `decode` and `mixed` by the tokens of the bucket."""

    model: str
    machine: str
    engine: dict[str, Any]  # sizes of the engine that was measured, see `sched_sizes`
    depth: int
    rows_per_turn: int  # decode rows that attend together, 0 = all of a bucket
    decode: dict[int, float]
    mixed: dict[int, float]
    decode_token_s: float
    prefill_pair_s: float
    sampler_row_s: float
    plan_s: tuple[float, ...]  # of a step, of its rows, prefill rows, prefill tokens
    finish_s: tuple[float, ...]  # of a step, of its rows
    byte_s: float  # of a copy between device and host memory
    num_samples: int = 0
    residual: float = 0.0  # median of |measured / fitted - 1| over the samples
    page_bytes: tuple[int, ...] = (1,)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Compiled shapes of the engine that is simulated: those of the measured one."""
        return all_buckets(self.engine["max_num_seqs"], self.engine["max_num_batched_tokens"])

    def step(self, shape: StepShape) -> StepCost:
        """As measured; shapes between measured ones are interpolated. Raises ValueError when no
        compiled shape is large enough."""
        decode_only = not len(shape.counts)
        bucket = choose(self.buckets, shape.tokens, shape.rows, decode_only)
        if bucket is None:
            raise ValueError(f"no bucket holds {shape.tokens} tokens in {shape.rows} rows")
        sampler = next(n for n in row_buckets(self.engine["max_num_seqs"]) if n >= shape.rows)
        work = Work.of(shape, bucket, self.rows_per_turn, sampler)
        device = interpolate(self.decode if decode_only else self.mixed, bucket.tokens)
        device += self.decode_token_s * work.decode_tokens
        device += self.prefill_pair_s * work.prefill_pairs
        device += self.sampler_row_s * work.sampler_rows
        host = (1, shape.rows, len(shape.counts), int(shape.counts.sum()))
        return StepCost(
            sum(s * n for s, n in zip(self.plan_s, host, strict=True)),
            device,
            sum(s * n for s, n in zip(self.finish_s, host[:2], strict=True)),
            "decode" if decode_only else "prefill",
        )

    def transfer(self, num_bytes: int) -> float:
        return num_bytes * self.byte_s

    def sched_sizes(self, **changes: Any) -> SchedulerSizes:
        """The measured engine's sizes, with changes."""
        sizes = {**self.engine, **changes}
        groups = tuple(GroupSpec(window) for window in sizes.pop("windows"))
        return SchedulerSizes(groups=groups, **sizes)

    def save(self, path: str | Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")


def load_table(path: str | Path) -> Table:
    """Raises ValueError naming the file and what is wrong with it."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"table {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"table {path} is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is no table of `simulate --calibrate` (format {FORMAT})")
    try:
        for name in ("decode", "mixed"):
            fields[name] = {int(tokens): float(s) for tokens, s in fields[name].items()}
        for name in ("page_bytes", "plan_s", "finish_s"):
            fields[name] = tuple(fields[name])
        return Table(**fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"table {path} is damaged: {error}") from None


def interpolate(points: dict[int, float], at: int) -> float:
    """Between measured points linearly, outside them in proportion to the nearest."""
    known = sorted(points)
    if at > known[-1]:
        return points[known[-1]] * at / known[-1]
    return float(np.interp(at, known, [points[n] for n in known]))


def fit(samples: Sequence[Sample]) -> dict[str, Any]:
    """The table's times from measured steps: least squares of relative errors, none negative.

    Steps of a kind count by their mean, without those that took twice the median: a busy machine
    makes some last for several times the usual. Steps whose end the host did not wait for count
    only where their shape has no others. Raises ValueError when decode steps or steps with
    prefill are missing.
    """
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    exact = {(s.decode_only, s.bucket_tokens) for s in samples if s.exact}
    for s in samples:
        if not s.exact and (s.decode_only, s.bucket_tokens) in exact:
            continue
        key = (s.decode_only, s.bucket_tokens, s.rows, s.prefill_rows, s.prefill_tokens, s.work)
        groups.setdefault(key, []).append(s)
    points = list(groups.values())
    kinds = sorted({(s.decode_only, s.bucket_tokens) for s in samples})
    if not any(decode for decode, _ in kinds) or all(decode for decode, _ in kinds):
        raise ValueError("both decode steps and steps with prefill must be measured")
    column = {kind: i for i, kind in enumerate(kinds)}
    matrix = np.zeros((len(points), len(kinds) + 3))
    host = np.zeros((len(points), 4))
    for row, group in enumerate(points):
        s, work = group[0], group[0].work
        matrix[row, column[s.decode_only, s.bucket_tokens]] = 1
        matrix[row, len(kinds) :] = work.decode_tokens, work.prefill_pairs, work.sampler_rows
        host[row] = 1, s.rows, s.prefill_rows, s.prefill_tokens
    weight = np.sqrt([len(group) for group in points])
    device = _typical(points, "device_s")
    found = _solve(matrix, device, weight)
    plan = _solve(host, _typical(points, "plan_s"), weight)
    finish = _solve(host[:, :2], _typical(points, "finish_s"), weight)
    expected = matrix @ found
    off = [
        abs(s.device_s / max(expected[row], 1e-12) - 1)
        for row, group in enumerate(points)
        for s in group
    ]
    times = {kind: float(found[i]) for kind, i in column.items()}
    return {
        "decode": {n: s for (decode, n), s in times.items() if decode},
        "mixed": {n: s for (decode, n), s in times.items() if not decode},
        "decode_token_s": float(found[-3]),
        "prefill_pair_s": float(found[-2]),
        "sampler_row_s": float(found[-1]),
        "plan_s": tuple(map(float, plan)),
        "finish_s": tuple(map(float, finish)),
        "num_samples": len(samples),
        "residual": float(np.median(off)),
    }


def _typical(points: Sequence[Sequence[Sample]], name: str, most: float = 2.0) -> Any:
    """Mean of each group, without what is above `most` times its median."""
    means = []
    for group in points:
        values = np.array([getattr(s, name) for s in group])
        means.append(values[values <= most * np.median(values)].mean())
    return np.array(means)


def _solve(matrix: Any, values: Any, weight: Any) -> Any:
    """Weighted least squares of relative errors."""
    scale = weight / np.maximum(values, 1e-12)
    return _non_negative(matrix * scale[:, None], values * scale)


def _non_negative(matrix: Any, values: Any) -> Any:
    """Least squares without negative coefficients: those that would be are set to 0 in turn."""
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)  # columns of very different units
    used = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while used:
        part = np.linalg.lstsq(matrix[:, used] / scale[used], values, rcond=None)[0]
        if part.min() >= 0:
            found[used] = part / scale[used]
            break
        used.pop(int(part.argmin()))
    return found
