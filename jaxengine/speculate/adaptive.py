"""Choosing K online: the number of drafts that brings the most tokens a second.

A controller of plain numbers. What it knows: the share of rows whose j-th draft was accepted
(of all batch sizes together, old steps forgotten), and the seconds of a step by compiled batch
size and K. What it promises: for every batch size, the time lost against K = 0 stays at `budget`
of the time spent, beside a few steps. An account earns that share of every step and pays what a
step lost: its seconds, less what K = 0 would have needed for the same tokens. That is counted
from what really happened, so a wrong estimate cannot hide a loss; while the account is empty,
K = 0 runs. Exploring is paid from the same account, and so are looks for drafts that find none.
At worst, where no draft is ever right, all of this costs `budget` of the time: 54 seconds an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

_SAMPLES = 5  # step times kept for a (batch size, K): their median shrugs off stray ones
_HALF_LIFE = 300.0  # rows after which an acceptance counts half
_PRIOR_ROWS = 4.0  # weight of the first guess of acceptance
_PRIOR = 0.5
_GAIN = 1.01  # K is worth it above so much of the rate of K = 0
_SAVED = 500.0  # steps whose share the account may hold
_STRAY = 3.0  # what is slower than so many usual steps counts as that, when it happens once
_REFERENCE_EVERY = 200  # steps between two measurements of K = 0, ...
_REFERENCE_STEPS = 2  # ... each of so many steps behind one that is not counted
_EXPLORE_EVERY = 25
_FIRST_REFERENCES = 3


@dataclass
class _Position:
    """Of one draft position: rows that could have had it accepted, and rows that had."""

    rows: float = _PRIOR_ROWS
    accepted: float = 0.0


@dataclass
class _Bucket:
    """What is known of one range of batch sizes."""

    seconds: dict[int, deque[float]] = field(default_factory=dict)  # of steps, by K
    last: dict[int, int] = field(default_factory=dict)  # step at which K was last tried
    step: int = 0
    before: int = 0  # K of the step before
    plain: int = 0  # step at which the last measurement of K = 0 ended
    counted: int = 0  # steps of K = 0 that are measured in this one
    explored: int = 0  # step at which a K that is not the best was last tried
    best: int = 0
    account: float = 0.0  # seconds that may be lost
    stray: set[int] = field(default_factory=set)  # K's whose last step was far slower than usual


class AdaptiveK:
    """`choose` before a step is drafted, `observe` after it. Not for steps with prefill.

    `allowed` are the values of K, 0 among them. `budget` is the share of time that may be lost
    against K = 0. Deterministic; uses no clock. Raises ValueError for an empty or negative set.
    """

    def __init__(self, allowed: Sequence[int], *, budget: float = 0.015) -> None:
        if not allowed or min(allowed) < 0:
            raise ValueError(f"allowed must be numbers of drafts of at least 0, got {allowed}")
        if not 0 < budget < 1:
            raise ValueError(f"budget must be between 0 and 1, got {budget}")
        self.allowed = tuple(sorted({0, *allowed}))
        self._budget = budget
        guess = 1.0
        self._positions: list[_Position] = []
        for _ in range(self.allowed[-1]):
            guess *= _PRIOR
            self._positions.append(_Position(_PRIOR_ROWS, guess * _PRIOR_ROWS))
        self._buckets: dict[int, _Bucket] = {}

    def choose(self, batch_size: int) -> int:
        """K for a step of so many decode rows; asked again before a step was observed, the answer
        stays the same. Raises ValueError below one row."""
        return self._choose(self._bucket(batch_size), batch_size)

    def observe(
        self,
        batch_size: int,
        k: int,
        seconds: float,
        drafts: int,
        accepted_by_position: Sequence[int],
    ) -> None:
        """A step with K = k has taken `seconds`: all of the engine's time since the step before.

        `drafts` are all draft tokens of the step and `accepted_by_position[j]` the rows whose
        j + 1 first drafts were all accepted. A step with k > 0 in which no row found a draft
        counts for the account alone: looking is cheap, and what is found next may be right.
        """
        bucket = self._bucket(batch_size)
        bucket.step += 1
        accepted = list(accepted_by_position)[:k]
        if drafts:
            self._learn(batch_size, k, accepted)
        before, bucket.before = bucket.before, k
        if seconds <= 0:
            return
        if k and drafts:
            bucket.seconds.setdefault(k, deque(maxlen=_SAMPLES)).append(seconds)
        elif k == 0:
            self._measure_plain(bucket, before, seconds)
        bucket.last[k] = bucket.step
        if k != bucket.best:
            bucket.explored = bucket.step
        reference = self._seconds(batch_size, 0)
        if reference is None:
            return
        # A compilation or a pause of the machine is nobody's fault; a change of costs is.
        limit = _STRAY * (self._seconds(batch_size, k) or reference)
        took = seconds if k in bucket.stray else min(seconds, limit)
        if seconds > limit:
            bucket.stray.add(k)
        else:
            bucket.stray.discard(k)
        loss = took - reference * (1.0 + sum(accepted) / batch_size) if k else 0.0
        most = self._budget * _SAVED * reference
        bucket.account = min(most, bucket.account + self._budget * took - loss)

    def _measure_plain(self, bucket: _Bucket, before: int, seconds: float) -> None:
        """The first step behind one with drafts also pays for the change: the engine waits for
        its result before it can plan on."""
        if before:
            bucket.counted = 0
            return
        bucket.seconds.setdefault(0, deque(maxlen=_SAMPLES)).append(seconds)
        bucket.counted += 1
        if bucket.counted >= _REFERENCE_STEPS:
            bucket.plain = bucket.step

    def acceptance(self) -> list[float]:
        """The estimated share of rows with drafts 1 .. j + 1 accepted, by j."""
        return [position.accepted / position.rows for position in self._positions]

    def rate(self, batch_size: int, k: int) -> float | None:
        """Expected tokens a second; None before anything was measured."""
        seconds = self._seconds(batch_size, k)
        if seconds is None:
            return None
        return batch_size * (1.0 + sum(self.acceptance()[:k])) / seconds

    def _choose(self, bucket: _Bucket, batch_size: int) -> int:
        known = len(bucket.seconds.get(0, ()))
        if known < _FIRST_REFERENCES:
            return 0
        reference = self._seconds(batch_size, 0)
        assert reference is not None
        if bucket.account < 0:
            return 0
        if bucket.step - bucket.plain >= _REFERENCE_EVERY:
            return 0
        rates = {k: self.rate(batch_size, k) or 0.0 for k in self.allowed}
        best = max(self.allowed, key=lambda k: rates[k] * (1.0 if k else _GAIN))
        bucket.best = best
        # Until it was really tried, which may need a step to end before; but not for ever.
        if (bucket.step - bucket.explored) // _EXPLORE_EVERY % 2:
            candidate = self._oldest(bucket, best)
            worst = (self._seconds(batch_size, candidate) or reference) - reference
            # At worst nothing is accepted.
            if worst <= bucket.account:
                return candidate
        return best

    def _oldest(self, bucket: _Bucket, best: int) -> int:
        """The K next to the best, or the smallest, that was not measured for longest."""
        at = self.allowed.index(best)
        near = {self.allowed[max(0, at - 1)], self.allowed[min(len(self.allowed) - 1, at + 1)]}
        if len(self.allowed) > 1:
            near.add(self.allowed[1])
        return min(sorted(near - {best}) or [best], key=lambda k: bucket.last.get(k, -1))

    def _seconds(self, batch_size: int, k: int) -> float | None:
        """Seconds of a step: measured, else from the nearest bucket that has both K's. Programs
        are compiled for a bucket's largest batch, so that smaller ones take nearly as long."""
        bucket = self._bucket(batch_size)
        if times := bucket.seconds.get(k):
            return median(times)
        base = bucket.seconds.get(0)
        if not base:
            return None
        here = _index(batch_size)
        for index in sorted(self._buckets, key=lambda i: abs(i - here)):
            other = self._buckets[index].seconds
            if other.get(k) and other.get(0):
                return median(base) * median(other[k]) / median(other[0])
        # Nothing known: between free and one step a draft.
        smaller = [j for j in self.allowed if j < k and bucket.seconds.get(j)]
        nearest = smaller[-1] if smaller else 0
        return median(bucket.seconds[nearest]) * (1.0 + 0.1 * (k - nearest))

    def _learn(self, batch_size: int, k: int, accepted: list[int]) -> None:
        keep = 0.5 ** (batch_size / _HALF_LIFE)
        for j, position in enumerate(self._positions[:k]):
            position.rows = position.rows * keep + batch_size
            position.accepted = position.accepted * keep + (accepted[j] if j < len(accepted) else 0)
        # Later positions were not tried: they follow the last one that was.
        ratio = self._positions[k - 1].accepted / self._positions[k - 1].rows
        for j, position in enumerate(self._positions[k:], 1):
            limit = ratio * position.rows
            if position.accepted > limit:
                position.accepted = limit * 0.9**j

    def _bucket(self, batch_size: int) -> _Bucket:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return self._buckets.setdefault(_index(batch_size), _Bucket())


def _index(batch_size: int) -> int:
    """Buckets are powers of two, as the compiled shapes are."""
    return (batch_size - 1).bit_length()
