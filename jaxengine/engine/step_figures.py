"""Counts of the step loop that only metrics want; names as `metrics.figures` reads them."""

from __future__ import annotations

from collections import Counter

from jaxengine.sched.batch import Bucket
from jaxengine.sched.plan import StepPlan


class StepFigures:
    """One engine's counts since its start."""

    def __init__(self) -> None:
        self._buckets: Counter[Bucket] = Counter()
        self._wasted = 0

    def submitted(self, bucket: Bucket) -> None:
        """A step was sent to the device in this shape."""
        self._buckets[bucket] += 1

    def reconciled(self, plan: StepPlan, num_updates: int) -> None:
        """A step's result came in, and brought so many sequences news. Rows that sampled for none
        were of sequences that had ended while the step was in flight."""
        self._wasted += max(0, int(plan.samples.sum()) - num_updates)

    def figures(self, sleep_level: int = 0) -> dict[str, float]:
        """For `EngineStats.extra`."""
        found = {"async_wasted_rows": float(self._wasted), "sleep_level": float(sleep_level)}
        for bucket, count in self._buckets.items():
            name = f"bucket_{_kind(bucket)}_{bucket.tokens}_{bucket.rows}"
            found[name] = found.get(name, 0.0) + count
        return found


def _kind(bucket: Bucket) -> str:
    if bucket.drafts:
        return "verify"
    return "decode" if bucket.decode_only else "mixed"
