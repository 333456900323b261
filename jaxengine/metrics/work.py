"""Estimates of what a step costs a device: arithmetic and memory traffic, counted from the model's
shape. Norms, activations, rotary embedding and sampling are left out; they are small beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jaxengine.models.spec import DecoderSpec

Ints = NDArray[np.integer]


@dataclass(frozen=True)
class Work:
    """Of one step, on one device. Bytes are of weights and KV, not of activations."""

    flops: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0


@dataclass(frozen=True)
class WorkModel:
    """What a model costs. `layers`: pairs (window, layers with it); 0 is full attention."""

    token_params: float  # weights that a token is multiplied with, the head apart
    head_params: float  # of the output head, for each row that samples
    dense_params: float  # read once a step, whatever is in it
    expert_params: float  # one expert of every layer with experts
    experts: int
    top_k: int
    pair_flops: float  # a query and a key that meet, in one layer
    kv_numbers: float  # that a token keeps in one layer
    layers: tuple[tuple[int, int], ...]
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    devices: int = 1  # that share the work evenly

    def shared_by(self, devices: int) -> WorkModel:
        """The share of one of so many devices."""
        return replace(self, devices=devices)

    def step(self, start: Ints, num_new: Ints, num_sampled: int) -> Work:
        """Rows that feed `num_new` [S] tokens behind `start` [S] others; so many of them sample."""
        tokens = float(num_new.sum())
        if not tokens:
            return Work()
        flops = 2.0 * (self.token_params * tokens + self.head_params * num_sampled)
        kv_read = 0.0
        for window, count in self.layers:
            flops += count * self.pair_flops * _pairs(start, num_new, window)
            reach = start + num_new
            seen = np.minimum(reach, window + num_new - 1) if window else reach
            kv_read += count * float(seen.sum())
        used = min(float(self.experts), tokens * self.top_k)
        weights = self.dense_params + self.head_params + used * self.expert_params
        num_layers = sum(count for _, count in self.layers)
        read = weights * self.weight_bytes + kv_read * self.kv_numbers * self.kv_bytes
        written = tokens * num_layers * self.kv_numbers * self.kv_bytes
        return Work(flops / self.devices, read / self.devices, written / self.devices)


def _pairs(start: Ints, num_new: Ints, window: int) -> float:
    """Keys that the new tokens look at: token i of a row sees start + i + 1, at most `window`."""
    growing = np.clip(window - start, 0, num_new) if window else num_new
    pairs = growing * start + growing * (growing + 1) // 2
    return float((pairs + (num_new - growing) * window).sum())


def work_model(
    spec: DecoderSpec, weight_bytes: float = 2.0, kv_bytes: float | None = None
) -> WorkModel:
    """From a model's shape. `weight_bytes`, `kv_bytes`: of one number (kv: as weights)."""
    attention, pair_flops, kv_numbers = _attention(spec)
    moe, width = spec.moe, spec.hidden_size
    num_moe = sum(spec.is_moe(layer) for layer in range(spec.num_layers))
    mlp = 3.0 * width * spec.ffn_size * (spec.num_layers - num_moe)
    expert = shared = 0.0
    if moe is not None:
        expert = 3.0 * width * moe.ffn_size * num_moe
        shared = (3.0 * width * moe.shared_ffn_size + width * moe.num_experts) * num_moe
    dense = attention * spec.num_layers + mlp + shared
    windows = spec.windows or (0,) * spec.num_layers
    return WorkModel(
        token_params=dense + expert * (moe.top_k if moe else 0),
        head_params=float(width * spec.vocab_size),
        dense_params=dense,
        expert_params=expert,
        experts=moe.num_experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        pair_flops=pair_flops,
        kv_numbers=kv_numbers,
        layers=tuple((window, windows.count(window)) for window in sorted(set(windows))),
        weight_bytes=weight_bytes,
        kv_bytes=weight_bytes if kv_bytes is None else kv_bytes,
    )


def _attention(spec: DecoderSpec) -> tuple[float, float, float]:
    """Weights of a layer, FLOPs of a pair, numbers a token keeps."""
    width, heads = spec.hidden_size, spec.num_heads
    if spec.mla is None:
        q = heads * spec.head_dim
        kv = spec.num_kv_heads * spec.head_dim
        return 2.0 * width * (q + kv), 4.0 * q, 2.0 * kv
    mla = spec.mla
    queries = heads * (mla.nope_dim + mla.rope_dim)
    params = (width + queries) * mla.q_rank if mla.q_rank else width * queries
    params += width * mla.width
    params += mla.latent * heads * (mla.nope_dim + mla.value_dim)
    params += heads * mla.value_dim * width
    return float(params), 2.0 * heads * (mla.width + mla.latent), float(mla.width)
