"""Synthetic requests, in the form of a trace: block ids say which prompts begin alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxengine.lab.bench.datasets import BenchRequest

_UNIQUE = 1 << 40  # block ids from here on belong to one request


def fixed_requests(
    count: int, prompt_len: int, output_len: int, *, prefix_len: int = 0, prefixes: int = 1
) -> list[BenchRequest]:
    """`count` requests at once; each prompt is one of `prefixes` prefixes of `prefix_len` tokens
    (drawn in turn) and `prompt_len` tokens of its own."""
    lengths = [(prompt_len, output_len)] * count
    return _requests(lengths, prefix_len, prefixes)


def random_requests(
    count: int,
    prompt_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    *,
    prefix_len: int = 0,
    prefixes: int = 1,
    seed: int = 0,
) -> list[BenchRequest]:
    """The same with lengths uniform within `range_ratio` of the given ones, at least 1.

    Raises ValueError for a ratio outside [0, 1).
    """
    if not 0 <= range_ratio < 1:
        raise ValueError(f"range ratio must be in [0, 1), got {range_ratio}")
    rng = np.random.default_rng([seed, 4])

    def around(length: int) -> list[int]:
        low, high = length * (1 - range_ratio), length * (1 + range_ratio)
        drawn = rng.integers(max(1, round(low)), max(1, round(high)) + 1, count)
        return [int(n) for n in drawn]

    return _requests(
        list(zip(around(prompt_len), around(output_len), strict=True)), prefix_len, prefixes
    )


def _requests(
    lengths: Sequence[tuple[int, int]], prefix_len: int, prefixes: int
) -> list[BenchRequest]:
    """Without a prefix a prompt is one block of its own. With one, blocks are as long as it."""
    if prefix_len < 0 or prefixes < 1:
        raise ValueError(
            "prefix length must be at least 0 and prefixes at least 1, got "
            f"{prefix_len} and {prefixes}"
        )
    out = []
    for i, (prompt_len, output_len) in enumerate(lengths):
        if prompt_len < 1 or output_len < 1:
            raise ValueError(f"lengths must be at least 1, got {prompt_len} and {output_len}")
        size = prefix_len or prompt_len
        own = -(-prompt_len // size)
        ids = tuple(_UNIQUE + i * 4096 + j for j in range(own))
        if prefix_len:
            ids = (i % prefixes, *ids)
        out.append(BenchRequest(0.0, (), prefix_len + prompt_len, output_len, None, size, ids))
    return out


def faster(requests: Sequence[BenchRequest], factor: float) -> list[BenchRequest]:
    """The same requests, arriving `factor` times as fast."""
    if not factor > 0:
        raise ValueError(f"speed must be above 0, got {factor}")
    return [dataclasses.replace(r, arrival=r.arrival / factor) for r in requests]
