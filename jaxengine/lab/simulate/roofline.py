"""Step times of a named GPU from bytes and FLOPs.

The method is the roofline (Williams, Waterman and Patterson, 2009): a product takes as long as
its arithmetic or its memory traffic, whichever is longer; collectives and launches are added. The
products are those of `parallel.cost`, which also predicts dual-batch overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxengine.lab.simulate.cost import StepCost, StepShape
from jaxengine.lab.simulate.gpus import Gpu
from jaxengine.models.cache import cache_bytes_per_token, device_bytes_per_token
from jaxengine.models.params import count_params
from jaxengine.models.spec import DecoderSpec, local_spec
from jaxengine.parallel.cost import (
    Machine,
    MoeShape,
    choose_exchange,
    exchange_seconds,
    expert_seconds,
    product_seconds,
)
from jaxengine.parallel.layout import StepLayout

RESERVE = 2 * 2**30  # bytes for activations and programs, as `runner.kv_room` keeps free
SAMPLING = 30e-6  # seconds of a sampler beside the head's product


PLANNING = 0.7  # of the host's time comes before the step is submitted


@dataclass(frozen=True)
class Host:
    """Seconds of the host for a step and for each of its rows. The defaults are assumed: half of
    what a step of 32 rows costs the host of a 2-core CPU machine (docs/benchmarks.md)."""

    step_s: float = 2e-3
    row_s: float = 14e-6


@dataclass(frozen=True)
class Roofline:
    """A model on `tensor_parallel` GPUs of a kind. A `CostModel`.

    dtype: of weights and products, a key of `Gpu.flops`; the cache holds `kv_bytes` a number.
    `efficiency`: share of the peak arithmetic that large products reach; `memory_efficiency`:
    share of the peak bandwidth.
    """

    spec: DecoderSpec
    gpu: Gpu
    tensor_parallel: int = 1
    expert_parallel: bool = False
    dtype: str = "bfloat16"
    kv_bytes: int = 2
    efficiency: float = 0.7
    memory_efficiency: float = 0.8
    host: Host = field(default_factory=Host)
    _dense_times: dict[tuple[int, int], dict[str, float]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be divided, or a type that the GPU does not have."""
        if self.dtype not in self.gpu.flops:
            known = ", ".join(self.gpu.flops)
            raise ValueError(f"{self.gpu.name} has no rate for {self.dtype}; it has {known}")
        for name in ("efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        _ = self.local

    @cached_property
    def local(self) -> DecoderSpec:
        """The model as one GPU sees it."""
        return local_spec(self.spec, self.tensor_parallel, expert_parallel=self.expert_parallel)

    @cached_property
    def machine(self) -> Machine:
        """The GPU at the share of its peaks that is reached."""
        return Machine(
            flops=self.gpu.flops[self.dtype],
            memory=self.gpu.memory * self.memory_efficiency,
            link=self.gpu.link,
            latency=self.gpu.collective_latency,
            best_share=self.efficiency,
        )

    # -- sizes --------------------------------------------------------------------------------

    @property
    def item_bytes(self) -> int:
        return 1 if self.dtype in ("float8", "int8") else 4 if self.dtype == "float32" else 2

    @property
    def weight_bytes(self) -> int:
        """On one GPU. What is not divided (norms, routers) is small and counted as divided."""
        return count_params(self.spec)[0] * self.item_bytes // self.tensor_parallel

    @property
    def token_bytes(self) -> int:
        """KV of one token over all GPUs of the engine."""
        layout = StepLayout(tensor_size=self.tensor_parallel)
        return cache_bytes_per_token(self.spec, self.kv_bytes, layout)

    def kv_blocks(self, block_size: int, utilization: float = 0.92) -> int:
        """Blocks beside the weights, as the engine sizes its pool. Raises ValueError for none."""
        room = int(self.gpu.memory_bytes * utilization) - self.weight_bytes - RESERVE
        layout = StepLayout(tensor_axis="tensor", tensor_size=self.tensor_parallel)
        blocks = room // (device_bytes_per_token(self.spec, self.kv_bytes, layout) * block_size)
        if blocks < 1:
            need, have = self.weight_bytes / 2**30, self.gpu.memory_bytes / 2**30
            raise ValueError(
                f"the model does not fit: {need:.1f} GiB of weights on each of "
                f"{self.tensor_parallel} {self.gpu.name} with {have:.1f} GiB"
            )
        return blocks

    # -- times --------------------------------------------------------------------------------

    def step(self, shape: StepShape) -> StepCost:
        """Seconds of one step; `bound` is compute, memory, communication or launches."""
        key = (shape.tokens, shape.rows)
        if key not in self._dense_times:
            self._dense_times[key] = _dense(self, *key)
        parts = self._dense_times[key]
        attention, bound = self._attention(shape)
        parts = {**parts, bound: parts.get(bound, 0.0) + attention}
        host = self.host.step_s + self.host.row_s * shape.rows
        bound = max(parts, key=parts.__getitem__)
        return StepCost(PLANNING * host, sum(parts.values()), (1 - PLANNING) * host, bound)

    def transfer(self, num_bytes: int) -> float:
        """One GPU of the engine copies its share."""
        return 20e-6 + num_bytes / self.tensor_parallel / self.gpu.host_link

    def _attention(self, shape: StepShape) -> tuple[float, str]:
        """All layers' attention over the cache: prompts mostly compute, decodes mostly read."""
        spec = self.local
        flops = read = 0.0
        windows = self.spec.windows or (0,) * self.spec.num_layers
        for window in set(windows):
            layers = windows.count(window)
            contexts = np.minimum(shape.contexts, window) if window else shape.contexts
            ends = shape.starts + shape.counts
            seen = np.minimum(ends, window + shape.counts) if window else ends
            # A chunk's queries see on average what was there and half of the chunk.
            pairs = contexts.sum() + (shape.counts * (seen - shape.counts / 2)).sum()
            turns = -(-shape.counts // 128)  # tiles of queries that read the context anew
            # The tiles run side by side and share much of what they read in the GPU's cache.
            tokens = contexts.sum() + (seen * np.minimum(turns, 2)).sum()
            if spec.mla is not None:
                width = 2 * spec.mla.latent + spec.mla.rope_dim
                flops += 2.0 * layers * pairs * spec.num_heads * width
                read += layers * tokens * spec.mla.width * self.kv_bytes
            else:
                flops += 4.0 * layers * pairs * spec.num_heads * spec.head_dim
                read += 2.0 * layers * tokens * spec.num_kv_heads * spec.head_dim * self.kv_bytes
        arithmetic = flops / (self.gpu.flops["bfloat16"] * self.efficiency)
        traffic = read / self.machine.memory
        seconds = max(arithmetic, traffic)
        return seconds, "compute" if arithmetic > traffic else "memory"


def _dense(model: Roofline, tokens: int, rows: int) -> dict[str, float]:
    """Everything that does not depend on contexts: seconds by what binds them."""
    whole, spec, machine = model.spec, model.local, model.machine
    size = model.item_bytes
    parts = dict.fromkeys(("compute", "memory", "communication", "launches"), 0.0)

    def product(n: int, out: int, depth: int, times: int = 1) -> None:
        seconds = product_seconds(machine, n, out, depth, size) - machine.launch
        traffic = (out * depth + n * (out + depth)) * size / machine.memory
        parts["memory" if seconds <= traffic else "compute"] += times * seconds
        parts["launches"] += times * machine.launch

    layers, width = spec.num_layers, spec.hidden_size
    if spec.mla is not None:
        mla = spec.mla
        product(tokens, mla.width, width, layers)
        query = spec.num_heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank:
            product(tokens, mla.q_rank, width, layers)
        product(tokens, query, mla.q_rank or width, layers)
        # The latent's up-projections, absorbed into queries and values.
        product(tokens, spec.num_heads * (mla.nope_dim + mla.value_dim), mla.latent, layers)
        product(tokens, width, spec.num_heads * mla.value_dim, layers)
    else:
        heads = spec.num_heads * spec.head_dim
        product(tokens, heads + 2 * spec.num_kv_heads * spec.head_dim, width, layers)
        product(tokens, width, heads, layers)
    # Attention, its cache write, norms: launches beside the products.
    parts["launches"] += layers * 4 * machine.launch
    sparse = sum(spec.is_moe(i) for i in range(layers))
    if layers > sparse:
        product(tokens, 2 * spec.ffn_size, width, layers - sparse)
        product(tokens, width, spec.ffn_size, layers - sparse)
    if sparse:
        _experts(model, tokens, sparse, parts)
        if spec.moe is not None and spec.moe.shared_ffn_size:
            product(tokens, 3 * spec.moe.shared_ffn_size, width, sparse)
    vocabulary = -(-whole.vocab_size // model.tensor_parallel)
    product(rows, vocabulary, width)
    parts["launches"] += SAMPLING
    if model.tensor_parallel > 1:
        dense = layers - sparse if model.expert_parallel else layers
        parts["communication"] += (layers + dense) * _all_reduce(model, tokens)
    return parts


def _experts(model: Roofline, tokens: int, layers: int, parts: dict[str, float]) -> None:
    """The experts' products, and under expert parallelism their exchange."""
    spec, machine, devices = model.spec, model.machine, model.tensor_parallel
    moe = spec.moe
    assert moe is not None
    inner = moe.ffn_size if model.expert_parallel else -(-moe.ffn_size // devices)
    shape = MoeShape(
        spec.hidden_size, inner, moe.num_experts, moe.top_k,
        spec.num_heads, spec.num_kv_heads, spec.head_dim, model.item_bytes,
    )  # fmt: skip
    over = devices if model.expert_parallel else 1
    share = tokens / over
    seconds = expert_seconds(machine, shape, share, over)
    touched = moe.num_experts / over * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
    traffic = touched * 3 * inner * spec.hidden_size * model.item_bytes / machine.memory
    parts["memory" if traffic > 0.5 * seconds else "compute"] += layers * seconds
    if over > 1:
        each = math.ceil(share)
        backend, rows = choose_exchange(
            each, moe.top_k, spec.hidden_size, 2, moe.num_experts, over, machine
        )
        exchange = exchange_seconds(
            machine, backend, tokens=each, top_k=moe.top_k, width=spec.hidden_size, itemsize=2,
            num_experts=moe.num_experts, devices=over, rows=rows,
        )  # fmt: skip
        parts["communication"] += layers * exchange


def _all_reduce(model: Roofline, tokens: int) -> float:
    """A ring: reduce-scatter and all-gather, each of the share that is not here."""
    count, machine = model.tensor_parallel, model.machine
    moved = 2 * tokens * model.spec.hidden_size * 2 * (count - 1) / count
    return machine.latency + moved / machine.link
