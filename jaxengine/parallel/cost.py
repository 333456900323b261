"""Predicted times of a mixture-of-experts layer: which exchange to use, when two halves pay.

Times are seconds of one layer on one device; token counts are per device. The model is coarse
(roofline with tile rounding); it orders choices, it does not replace a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxengine.parallel.capacity import capacity, visit_probability


@dataclass(frozen=True)
class Machine:
    """Rates a second; `latency` in seconds of one collective, `conditional` of a host-read branch.

    `sm_share` is the share of the multiprocessors that copies of a collective occupy.
    """

    flops: float = 989e12  # dense bf16
    memory: float = 4.8e12
    link: float = 450e9  # NVLink, each way
    latency: float = 12e-6
    conditional: float = 20e-6
    launch: float = 3e-6
    best_share: float = 0.7  # of the peak rate that a large product reaches
    sm_share: float = 16 / 132


H200 = Machine()


@dataclass(frozen=True)
class MoeShape:
    """A layer: D width, F inner, E experts, K per token; H, G heads of width C."""

    width: int
    inner: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2


QWEN3_30B_A3B = MoeShape(2048, 768, 128, 8, 32, 4, 128)


def product_seconds(m: Machine, rows: float, out: int, depth: int, itemsize: int = 2) -> float:
    """A dense product of `rows` rows: the larger of arithmetic (in tiles of 128) and memory."""
    tiles = math.ceil(rows / 128) * 128
    arithmetic = 2.0 * tiles * out * depth / (m.flops * m.best_share)
    traffic = (out * depth + rows * (out + depth)) * itemsize / m.memory
    return max(arithmetic, traffic) + m.launch


def expert_seconds(m: Machine, s: MoeShape, tokens: float, devices: int) -> float:
    """Both grouped products of a device's share, when all devices hold `tokens` tokens."""
    local = s.experts / devices
    everyone = tokens * devices
    touched = local * (1.0 - (1.0 - s.top_k / s.experts) ** everyone)
    rows = everyone * s.top_k / devices
    per_expert = rows / max(touched, 1e-9)
    tile = 64 if per_expert <= 64 else 128
    padded = touched * math.ceil(per_expert / tile) * tile
    arithmetic = 2.0 * padded * 3 * s.inner * s.width / (m.flops * m.best_share)
    weights = touched * 3 * s.inner * s.width * s.itemsize
    traffic = weights + rows * (2 * s.width + 2 * s.inner) * s.itemsize
    return max(arithmetic, traffic / m.memory) + 4 * m.launch


def attention_seconds(m: Machine, s: MoeShape, tokens: int, context: int, decode: bool) -> float:
    """Projections and attention; a decode token reads its own context, a prompt's tokens share."""
    heads, kv = s.heads * s.head_dim, 2 * s.kv_heads * s.head_dim
    projections = product_seconds(m, tokens, heads + kv, s.width) + product_seconds(
        m, tokens, s.width, heads
    )
    arithmetic = 4.0 * tokens * context * heads / (m.flops * m.best_share)
    rows = tokens if decode else math.ceil(tokens / 128)
    traffic = rows * context * kv * s.itemsize / m.memory
    return projections + max(arithmetic, traffic) + 2 * m.launch


def exchange_seconds(
    m: Machine,
    backend: str,
    *,
    tokens: int,
    top_k: int,
    width: int,
    itemsize: int,
    num_experts: int,
    devices: int,
    rows: int | None = None,
) -> float:
    """Dispatch and combine together. `rows` is the capacity of "all_to_all" (default: derived).

    Raises ValueError for an unknown backend.
    """
    payload = width * itemsize + 8 * top_k
    there_and_back = (payload + width * itemsize) * (devices - 1)
    visit = visit_probability(num_experts, max(num_experts // devices, 1), top_k)
    if backend == "allgather":
        return 2 * m.latency + tokens * there_and_back / m.link
    if backend == "all_to_all":
        rows = capacity(tokens, visit) if rows is None else rows
        branch = m.conditional if rows < tokens else 0.0
        packing = 2.0 * rows * devices * payload / m.memory + m.launch
        return 2 * m.latency + branch + packing + rows * there_and_back / m.link
    if backend == "ragged":
        # Sizes travel first; reported to reach a fraction of the link only.
        packing = 2.0 * tokens * visit * devices * payload / m.memory + 2 * m.launch
        return 3 * m.latency + packing + tokens * visit * there_and_back / (0.5 * m.link)
    raise ValueError(f"backend must be allgather, all_to_all or ragged, not {backend!r}")


def choose_exchange(
    tokens: int,
    top_k: int,
    width: int,
    itemsize: int,
    num_experts: int,
    devices: int,
    machine: Machine = H200,
) -> tuple[str, int]:
    """("allgather", tokens) or ("all_to_all", rows to reserve for each destination).

    "ragged" is never chosen: no measurement here supports it, and it does not run on CPU.
    """
    visit = visit_probability(num_experts, max(num_experts // devices, 1), top_k)
    small = capacity(tokens, visit)

    def seconds(backend: str, rows: int) -> float:
        return exchange_seconds(
            machine,
            backend,
            tokens=tokens,
            top_k=top_k,
            width=width,
            itemsize=itemsize,
            num_experts=num_experts,
            devices=devices,
            rows=rows,
        )

    options = [("allgather", tokens), ("all_to_all", tokens), ("all_to_all", small)]
    return min(options, key=lambda option: seconds(*option))


def sliced_is_faster(
    tokens: int,
    top_k: int,
    width: int,
    itemsize: int,
    num_experts: int,
    devices: int,
    machine: Machine = H200,
) -> bool:
    """For tokens every device holds: does a share each, exchanged and gathered, beat a psum?"""
    if tokens < devices:
        return False
    share = -(-tokens // devices)
    backend, rows = choose_exchange(share, top_k, width, itemsize, num_experts, devices, machine)
    exchange = exchange_seconds(
        machine, backend, tokens=share, top_k=top_k, width=width, itemsize=itemsize,
        num_experts=num_experts, devices=devices, rows=rows,
    )  # fmt: skip
    moved = tokens * width * itemsize * (devices - 1) / devices / machine.link
    return exchange + machine.latency + moved < 2 * machine.latency + 2 * moved


@dataclass(frozen=True)
class Gain:
    """Seconds of one layer as one batch and as two halves, and their quotient."""

    tokens: int
    whole: float
    halves: float

    @property
    def gain(self) -> float:
        return self.whole / self.halves


def overlap_gain(
    tokens: int,
    devices: int,
    *,
    decode: bool,
    context: int = 2048,
    shape: MoeShape = QWEN3_30B_A3B,
    machine: Machine = H200,
) -> Gain:
    """What two halves out of phase gain for `tokens` tokens a device."""
    s, m = shape, machine

    def parts(n: int) -> tuple[float, float, float]:
        _, rows = choose_exchange(n, s.top_k, s.width, s.itemsize, s.experts, devices, m)
        exchange = exchange_seconds(
            m, "all_to_all", tokens=n, top_k=s.top_k, width=s.width, itemsize=s.itemsize,
            num_experts=s.experts, devices=devices, rows=rows,
        )  # fmt: skip
        attention = attention_seconds(m, s, n, context, decode)
        return attention, expert_seconds(m, s, n, devices), exchange / 2

    attention, experts, one_way = parts(tokens)
    whole = attention + experts + 2 * one_way
    first, second = parts(tokens - tokens // 2), parts(max(tokens // 2, 1))
    slower = 1.0 / (1.0 - m.sm_share)
    halves = 0.0
    # (compute of one half, exchange of the other) in the order of `overlap.interleave`
    for compute, exchange in (
        (first[0], second[2]),
        (second[0], first[2]),
        (first[1], second[2]),
        (second[1], first[2]),
    ):
        # Compute is slowed only while the exchange runs beside it.
        beside = min(compute * slower, exchange)
        halves += max(exchange, beside + compute - beside / slower)
    return Gain(tokens, whole, halves)


def gain_table(
    devices: int,
    *,
    decode: bool,
    context: int = 2048,
    shape: MoeShape = QWEN3_30B_A3B,
    counts: tuple[int, ...] = (2, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
) -> list[Gain]:
    return [overlap_gain(n, devices, decode=decode, context=context, shape=shape) for n in counts]


def threshold(
    devices: int,
    *,
    decode: bool,
    context: int = 2048,
    shape: MoeShape = QWEN3_30B_A3B,
    limit: int = 65536,
) -> int | None:
    """The smallest power of two from which on two halves always pay; None if they never do."""
    best: int | None = None
    tokens = limit
    while tokens >= 2:
        if overlap_gain(tokens, devices, decode=decode, context=context, shape=shape).gain <= 1:
            return best
        best, tokens = tokens, tokens // 2
    return best


def describe(devices: int, *, context: int = 2048, shape: MoeShape = QWEN3_30B_A3B) -> str:
    """The tables of decode and prefill, and the thresholds that follow, as lines of text."""
    lines = []
    for kind, default in (("decode", 32), ("prefill", 512)):
        decode = kind == "decode"
        lines.append(f"{kind}: tokens a device, us a layer whole, in halves, gain")
        for g in gain_table(devices, decode=decode, context=context, shape=shape):
            times = f"{g.whole * 1e6:9.0f} {g.halves * 1e6:9.0f}"
            lines.append(f"{g.tokens:7d} {times} {100 * (g.gain - 1):+6.1f} %")
        found = threshold(devices, decode=decode, context=context, shape=shape)
        pays = "never" if found is None else f"from {found} tokens"
        lines.append(f"predicted to pay {pays}; the default threshold is {default}")
    return "\n".join(lines)
