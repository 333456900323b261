"""How many rows a device sends to each other one. Plain Python, sizes known when compiling."""

from __future__ import annotations

import math

ALIGN = 8  # rows


def visit_probability(num_experts: int, experts_per_device: int, top_k: int) -> float:
    """Chance that a token has an expert on one given device, if all experts were equally likely."""
    others = num_experts - experts_per_device
    if top_k > others:
        return 1.0
    return 1.0 - math.comb(others, top_k) / math.comb(num_experts, top_k)


def capacity(tokens: int, visit: float, sigmas: float = 6.0) -> int:
    """Rows a device reserves for each destination: the mean and `sigmas` standard deviations.

    Never more than `tokens`, which always suffices because a token goes to a device once.
    What does not fit in fewer is sent by a second exchange, so nothing is ever dropped.
    """
    mean = tokens * visit
    rows = mean + sigmas * math.sqrt(max(mean * (1.0 - visit), 0.0))
    return min(tokens, -(-math.ceil(rows) // ALIGN) * ALIGN)
