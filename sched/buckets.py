"""Which shapes are compiled, and which ones a plan runs in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxengine.sched.batch import Bucket

SMALLEST_MIXED = 64  # tokens


def all_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Decode rows in powers of two, mixed tokens in powers of two; the last is the limit itself.

    Mixed programs have all rows, so they hold at least max_num_seqs tokens.
    """
    decode = [Bucket(n, n, True) for n in row_buckets(max_num_seqs)]
    smallest = max(min(SMALLEST_MIXED, max_num_batched_tokens), max_num_seqs)
    largest = max(max_num_batched_tokens, max_num_seqs)
    mixed = [Bucket(n, max_num_seqs, False) for n in _ladder(smallest, largest)]
    return decode + mixed


@dataclass(frozen=True)
class Overlap:
    """When a step is run as two microbatches: fewest tokens, by kind of step."""

    decode_tokens: int
    prefill_tokens: int

    def wants(self, num_tokens: int, decode_only: bool) -> bool:
        return num_tokens >= max(2, self.decode_tokens if decode_only else self.prefill_tokens)


def in_halves(buckets: list[Bucket], overlap: Overlap | None) -> list[Bucket]:
    """The second programs of the buckets that are large enough for two microbatches."""
    if overlap is None:
        return []
    return [replace(b, dbo=True) for b in buckets if overlap.wants(b.tokens, b.decode_only)]


def row_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the decode and sample programs."""
    return tuple(_ladder(1, max_num_seqs))


def choose(
    buckets: list[Bucket], num_tokens: int, num_rows: int, decode_only: bool
) -> Bucket | None:
    """The smallest of these (ascending) buckets that holds the plan; None when none does."""
    for bucket in buckets:
        if (
            bucket.decode_only == decode_only
            and num_tokens <= bucket.tokens
            and num_rows <= bucket.rows
        ):
            return bucket
    return None


def _ladder(first: int, last: int) -> list[int]:
    sizes = []
    n = first
    while n < last:
        sizes.append(n)
        n *= 2
    return [*sizes, last]
