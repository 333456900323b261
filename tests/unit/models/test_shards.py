"""One device's share of a model: sizes, layouts of joined leaves, mesh axes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from testdata import GOLDENS

from jaxengine.models.cache import cache_bytes_per_token, cache_head_axis, cache_shapes
from jaxengine.models.families import spec_from_config
from jaxengine.models.params import arrange, layer_leaves, param_shapes, param_specs
from jaxengine.models.spec import DecoderSpec, local_spec
from jaxengine.parallel.layout import StepLayout

NAMES = ["llama", "olmo2", "gpt-oss", "qwen3-moe", "deepseek-v2", "deepseek-v3"]


def read(name: str) -> DecoderSpec:
    return spec_from_config(json.loads((GOLDENS / name / "config.json").read_text()))


def cut(array: np.ndarray, spec: P, index: int, count: int) -> np.ndarray:
    for axis, name in enumerate(spec):
        if name is not None:
            return np.split(array, count, axis)[index]
    return array


@pytest.mark.parametrize("experts_whole", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_shares_have_the_local_models_shapes(name: str, size: int, experts_whole: bool) -> None:
    """Also with 4 devices for 2 kv heads."""
    spec = read(name)
    layout = StepLayout(tensor_axis="t", tensor_size=size, expert_parallel=experts_whole)
    local = local_spec(spec, size, expert_parallel=experts_whole)
    specs = param_specs(spec, layout)
    shapes = param_shapes(spec, np.float32, size)
    for layer, (parts, whole) in enumerate(zip(specs["layers"], shapes["layers"], strict=True)):
        want = layer_leaves(local, layer)
        assert parts.keys() == whole.keys() == want.keys()
        for leaf, part in parts.items():
            if experts_whole and leaf.startswith("experts_"):
                continue  # their columns are not divided; the shape follows
            if leaf in ("router", "router_bias", "choice_bias"):
                assert part == P()
                continue
            assert cut(np.empty(whole[leaf].shape), part, 0, size).shape == want[leaf].shape, leaf
    if spec.moe is not None:
        gate_up = specs["layers"][-1]["experts_gate_up"]
        assert gate_up == (P(("t",)) if experts_whole else P(None, "t"))
        assert local.moe is not None
        assert local.moe.num_experts == (8 // size if experts_whole else 8)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_arranged_heads(size: int) -> None:
    """Every shard's q heads come with the kv head that they read."""
    spec = replace(read("llama"), num_heads=8, num_kv_heads=2, head_dim=2, hidden_size=3)
    owner = np.array([*range(8), *(100 + g for g in range(2)), *(200 + g for g in range(2))])
    joined = np.repeat(owner, 2)[:, None] * np.ones((1, 3), int)
    shards = np.split(arrange("qkv", joined, spec, size), size)
    local = local_spec(spec, size)
    for r, shard in enumerate(shards):
        heads = shard[::2, 0]
        q, k, v = np.split(heads, [local.num_heads, local.num_heads + local.num_kv_heads])
        assert q.tolist() == list(range(r * 8 // size, (r + 1) * 8 // size))
        for j, head in enumerate(q):
            mine = j * local.num_kv_heads // local.num_heads
            assert k[mine] == 100 + head // 4 and v[mine] == 200 + head // 4


def test_arranged_gate_and_up() -> None:
    spec = replace(read("mixtral"), hidden_size=1)
    assert spec.moe is not None
    spec = replace(spec, moe=replace(spec.moe, num_experts=2, ffn_size=4))
    stack = np.arange(16).reshape(2, 8, 1)
    got = arrange("experts_gate_up", stack, spec, 2)
    assert got[1, :, 0].tolist() == [8, 9, 12, 13, 10, 11, 14, 15]
    assert arrange("experts_gate_up", stack, spec, 2, expert_parallel=True) is stack
    assert arrange("experts_down", stack, spec, 2) is stack
    with pytest.raises(KeyError):
        arrange("kv_a", stack, spec, 2)


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "9 attention heads cannot be divided over 2"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "3 kv heads can be neither divided over 2"),
        ({"ffn_size": 111}, 2, "111 FFN columns cannot be divided over 2"),
    ],
)
def test_what_cannot_be_divided(changes: dict[str, Any], size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        local_spec(replace(read("llama"), **changes), size)


def test_experts_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="8 experts cannot be divided over 3 devices"):
        local_spec(read("mixtral"), 1, expert_parallel=True, devices=3)
    with pytest.raises(ValueError, match="48 FFN columns of an expert"):
        local_spec(replace(read("qwen3-moe"), num_heads=32, num_kv_heads=32), 32)


def test_experts_over_both_axes() -> None:
    layout = StepLayout(
        tensor_axis="t", tensor_size=2, data_axis="d", data_size=4, expert_parallel=True
    )
    specs = param_specs(read("qwen3-moe"), layout)
    assert specs["layers"][0]["experts_down"] == P(("d", "t"))
    assert specs["layers"][0]["o"] == P(None, "t") and specs["embed"] == P("t")
    assert all(isinstance(leaf, P) for leaf in jax.tree.leaves(specs))


def test_cache_shapes() -> None:
    llama, latent = read("llama"), read("deepseek-v3")
    assert cache_shapes(llama, StepLayout(), 5, 4) == ((5, 4, 32), (5, 4, 32))
    head_major = StepLayout(cache="head_major", tensor_axis="t", tensor_size=4)
    assert cache_shapes(llama, head_major, 5, 4) == ((5, 2, 4, 4, 16),)
    assert cache_head_axis(llama, head_major) == 2 and cache_head_axis(latent, head_major) is None
    assert cache_shapes(latent, head_major, 5, 4) == ((5, 4, 40),)
    assert cache_bytes_per_token(llama, 4) == 3 * 2 * 32 * 4
    assert cache_bytes_per_token(latent, 4, head_major) == 3 * 40 * 4


def test_odd_vocabularies_are_padded() -> None:
    spec = replace(read("llama"), vocab_size=321)
    assert param_shapes(spec, np.float32, 4)["embed"].shape == (324, spec.hidden_size)
    table = np.ones((321, spec.hidden_size), np.float32)
    padded = arrange("embed", table, spec, 4)
    assert padded.shape == (324, spec.hidden_size)
    assert padded[:321].all() and not padded[321:].any()
    assert arrange("embed", table, spec, 1) is table
