"""Counts of the step loop that only metrics want; names as `metrics.figures` reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxengine.metrics.work import WorkModel
from jaxengine.sched.batch import Bucket
from jaxengine.sched.plan import StepPlan


class StepCounts:
    """One engine's counts since its start. With a `work` model, estimates of FLOPs and bytes
    too."""

    def __init__(self, work: WorkModel | None = None) -> None:
        self._work = work
        self._flops = self._read = self._written = 0.0
        self._buckets: Counter[Bucket] = Counter()
        self._wasted = 0

    def submitted(self, bucket: Bucket, plans: Sequence[StepPlan] = ()) -> None:
        """A step of these plans was sent to the device in this shape."""
        self._buckets[bucket] += 1
        if self._work is not None:
            for plan in plans:
                work = self._work.step(plan.start, plan.num_new, int(plan.samples.sum()))
                self._flops += work.flops
                self._read += work.read_bytes
                self._written += work.write_bytes

    def reconciled(self, plan: StepPlan, num_updates: int) -> None:
        """A step's result came in and updated `num_updates` sequences. The other rows that sampled
        belonged to sequences that had ended while the step was in flight."""
        self._wasted += max(0, int(plan.samples.sum()) - num_updates)

    def stats(self) -> dict[str, float]:
        """Names and values for `EngineStats.extra`."""
        found = {"async_wasted_rows": float(self._wasted)}
        if self._work is not None:
            found["estimated_flops"] = self._flops
            found["estimated_read_bytes"] = self._read
            found["estimated_write_bytes"] = self._written
        for bucket, count in self._buckets.items():
            name = f"bucket_{_kind(bucket)}_{bucket.tokens}_{bucket.rows}"
            found[name] = found.get(name, 0.0) + count
        return found


def _kind(bucket: Bucket) -> str:
    if bucket.drafts:
        return "verify"
    return "decode" if bucket.decode_only else "mixed"
