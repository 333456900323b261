"""Estimates of FLOPs and bytes, against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.metrics.work import Work, work_model
from jaxengine.models.spec import DecoderSpec, MlaSpec, MoeSpec

DENSE = DecoderSpec("x", 100, 4, 8, 4, 2, 3, 16, 64, windows=(0, 5, 5, 0))


def test_a_dense_step_is_what_counting_gives() -> None:
    start, num_new = np.array([7, 0, 3]), np.array([1, 6, 4])
    work = work_model(DENSE, 2.0, 1.0).step(start, num_new, 2)
    q, kv = 4 * 3, 2 * 3
    layer = 8 * q + 2 * 8 * kv + q * 8 + 3 * 8 * 16
    pairs = seen = 0
    for window in DENSE.windows:
        for first, count in zip(start.tolist(), num_new.tolist(), strict=True):
            keys = set()
            for position in range(first, first + count):
                low = max(0, position - window + 1) if window else 0
                pairs += position - low + 1
                keys |= set(range(low, position + 1))
            seen += len(keys)
    assert work.flops == 2 * (4 * layer * 11 + 2 * 8 * 100) + 4 * q * pairs
    assert work.read_bytes == 2 * (4 * layer + 8 * 100) + seen * 2 * kv
    assert work.write_bytes == 11 * 4 * 2 * kv


def test_experts_are_read_as_far_as_they_are_used() -> None:
    spec = DecoderSpec("x", 100, 2, 8, 4, 2, 3, 16, 64, moe=MoeSpec(6, 2, 5), dense_layers=(0,))
    model = work_model(spec)
    assert model.expert_params == 3 * 8 * 5
    attention = 2 * 8 * (12 + 6)
    assert model.dense_params == 2 * attention + 3 * 8 * 16 + 8 * 6
    assert model.token_params == model.dense_params + 2 * 3 * 8 * 5
    reads = [
        model.step(np.array([0]), np.array([n]), 1).read_bytes - 2 * 2 * n * 2 * 6
        for n in (1, 3, 9)
    ]
    assert reads[1] - reads[0] == 4 * 3 * 8 * 5 * 2 and reads[2] == reads[1]


def test_latent_attention_keeps_one_latent() -> None:
    mla = MlaSpec(latent=16, rope_dim=4, nope_dim=8, value_dim=6)
    model = work_model(DecoderSpec("x", 100, 1, 8, 4, 4, 12, 16, 64, mla=mla))
    assert model.kv_numbers == 20 and model.pair_flops == 2 * 4 * (20 + 16)
    attention = 8 * 4 * 12 + 8 * 20 + 16 * 4 * 14 + 4 * 6 * 8
    assert model.dense_params == attention + 3 * 8 * 16


def test_devices_share_it() -> None:
    step = np.array([5]), np.array([3]), 1
    whole, half = work_model(DENSE).step(*step), work_model(DENSE).shared_by(2).step(*step)
    assert half.flops == pytest.approx(whole.flops / 2)
    assert work_model(DENSE).step(np.array([3]), np.array([0]), 0) == Work()
