"""config.json (old and new style) and published configurations onto DecoderSpec."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from testdata import CONFIGS

from jaxengine.models.families import UnsupportedModelError, spec_from_config, weight_names
from jaxengine.models.families.gguf import config_from_gguf
from jaxengine.models.spec import RopeSpec
from jaxengine.weights.load import leaf_shape

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def small(**changes: Any) -> dict[str, Any]:
    return {**SMALL, **changes}


def qwen2(**changes: Any) -> dict[str, Any]:
    return small(architectures=["Qwen2ForCausalLM"], **changes)


DENSE = ["Llama-3.1-8B", "Llama-3.3-70B-Instruct", "Mistral-7B-v0.3", "Qwen2.5-7B-Instruct"]
DENSE += ["Qwen3-8B", "SmolLM2-360M-Instruct"]


@pytest.mark.parametrize("name", DENSE)
def test_published_configuration(name: str) -> None:
    folder = CONFIGS / name
    want = json.loads((folder / "expected.json").read_text())
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    assert spec.num_layers == want["num_layers"]
    assert (spec.num_heads, spec.num_kv_heads) == (want["num_query_heads"], want["num_kv_heads"])
    assert spec.head_dim == want["head_dim"] and spec.vocab_size == want["vocab_size"]
    assert spec.tie_embeddings == want["tied_embeddings"]
    assert spec.rope.kind == want["rope_type"] and spec.rope.theta == want["rope_theta"]
    assert sum(1 for w in spec.windows if w) == want["windowed_layers"]
    top, layer = weight_names(spec, "hf")

    def count(leaves: dict[str, tuple[str, ...]]) -> int:
        total = 0
        for leaf in leaves:
            size = 1
            for n in leaf_shape(spec, leaf):
                size *= n
            total += size
        return total

    assert count(top) + spec.num_layers * count(layer) == want["param_count"]


@pytest.mark.parametrize(
    "name", ["DeepSeek-V2-Lite", "Mixtral-8x7B-v0.1", "gpt-oss-20b", "Qwen3-30B-A3B"]
)
def test_families_to_come_are_refused(name: str) -> None:
    folder = CONFIGS / name
    config = json.loads((folder / "config.json").read_text())
    from jaxengine.models.families import FAMILIES

    arch = config["architectures"][0]
    if arch in FAMILIES:
        assert spec_from_config(config).num_layers == config["num_hidden_layers"]
    else:
        with pytest.raises(UnsupportedModelError, match=f"architecture {arch} is not supported"):
            spec_from_config(config)


def test_defaults() -> None:
    spec = spec_from_config(SMALL)
    assert spec.num_kv_heads == 4 and spec.head_dim == 16 and spec.norm_eps == 1e-6
    assert spec.rope == RopeSpec() and spec.windows == () and spec.groups == (0,)
    assert not (spec.qkv_bias or spec.o_bias or spec.mlp_bias or spec.tie_embeddings)


def test_biases() -> None:
    spec = spec_from_config(small(attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    assert spec.qkv_bias and spec.o_bias and spec.mlp_bias
    top, layer = weight_names(spec, "hf")
    assert "head" not in top and {"qkv_bias", "o_bias", "gate_up_bias"} <= layer.keys()
    assert spec_from_config(qwen2()).qkv_bias and not spec_from_config(qwen2()).o_bias


def test_qwen3() -> None:
    spec = spec_from_config(small(architectures=["Qwen3ForCausalLM"], head_dim=32))
    assert spec.qk_norm and spec.head_dim == 32 and not spec.qkv_bias
    assert spec_from_config(small(architectures=["Qwen3ForCausalLM"])).head_dim == 128


OLD_LLAMA3 = {
    "rope_theta": 5e5,
    "rope_scaling": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
NEW_LLAMA3 = {
    "rope_parameters": {**OLD_LLAMA3["rope_scaling"], "rope_type": "llama3", "rope_theta": 5e5}  # type: ignore[dict-item]
}


@pytest.mark.parametrize("style", [OLD_LLAMA3, NEW_LLAMA3])
def test_llama3_rope_both_styles(style: dict[str, Any]) -> None:
    want = RopeSpec(theta=5e5, kind="llama3", factor=8.0, original_max_position=64)
    assert spec_from_config(small(**style)).rope == want


def test_rope_kinds() -> None:
    def rope(**scaling: Any) -> RopeSpec:
        return spec_from_config(small(rope_scaling=scaling)).rope

    assert rope(type="linear", factor=2) == RopeSpec(kind="linear", factor=2.0)
    yarn = rope(rope_type="yarn", factor=4, original_max_position_embeddings=128)
    assert yarn == RopeSpec(kind="yarn", factor=4.0, original_max_position=128)
    assert rope(rope_type="yarn", original_max_position_embeddings=128).factor == 4.0
    full = rope(rope_type="yarn", factor=4, attention_factor=0.9, beta_fast=16, truncate=False)
    assert (full.attention_factor, full.beta_fast, full.truncate) == (0.9, 16.0, False)
    assert full.original_max_position == 512
    for scaling, reason in (
        ({"rope_type": "dynamic", "factor": 2}, "rope type 'dynamic'"),
        ({"type": "longrope"}, "rope type 'longrope'"),
        ({"type": "linear"}, "lacks its factor"),
        ({"type": "linear", "factor": "2"}, "factor must be a number"),
        ({"type": "llama3", "factor": 2}, "lacks original_max_position_embeddings"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            rope(**scaling)


def test_mistral_window() -> None:
    def windows(**changes: Any) -> tuple[int, ...]:
        return spec_from_config(small(architectures=["MistralForCausalLM"], **changes)).windows

    assert windows(sliding_window=24) == (24,) * 4
    assert windows(sliding_window=None) == ()
    assert windows(sliding_window=512) == ()  # never takes effect
    assert windows(max_position_embeddings=32768) == (4096,) * 4  # absent: the class's default
    assert spec_from_config(small(architectures=["MistralForCausalLM"])).groups == (0,)


def test_qwen2_windows() -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    on = {"use_sliding_window": True, "sliding_window": 32}
    assert spec_from_config(qwen2(sliding_window=32)).windows == ()
    assert spec_from_config(qwen2(sliding_window=32, layer_types=kinds)).windows == ()
    assert spec_from_config(qwen2(**on, max_window_layers=3)).windows == (0, 0, 0, 32)
    assert spec_from_config(qwen2(**on, max_window_layers=9)).windows == ()
    spec = spec_from_config(qwen2(**on, layer_types=kinds))
    assert spec.windows == (0, 32, 0, 32) and spec.groups == (0, 32)
    with pytest.raises(UnsupportedModelError, match="layer_types must name 4 layers"):
        spec_from_config(qwen2(**on, layer_types=kinds[:3]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "architecture NoSuchForCausalLM is not supp"),
        ({"architectures": [], "model_type": "zz"}, "architecture zz is not supported"),
        ({"hidden_size": None}, "config field hidden_size must be a positive integer, not None"),
        ({"vocab_size": "320"}, "config field vocab_size"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"hidden_size": 66}, "66 is not divisible by 4 heads"),
        ({"head_dim": 15}, "odd head_dim 15"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized checkpoint \(gptq\)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        spec_from_config(small(**changes))


def test_model_type_alone() -> None:
    assert spec_from_config({**SMALL, "architectures": None, "model_type": "qwen2"}).qkv_bias


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 112,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e4,
}
SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}


def test_gguf_metadata() -> None:
    spec = spec_from_config(config_from_gguf(GGUF, SHAPES))
    assert (spec.family, spec.num_kv_heads, spec.vocab_size) == ("llama", 2, 320)
    assert spec.rope.theta == 5e4 and not spec.tie_embeddings and not spec.qkv_bias
    biased = {**SHAPES, "blk.0.attn_q.bias": (64,)}
    spec = spec_from_config(config_from_gguf(GGUF, biased))
    assert spec.qkv_bias and not spec.o_bias
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    yarn |= {"llama.rope.scaling.original_context_length": 128}
    rope = spec_from_config(config_from_gguf({**GGUF, **yarn}, SHAPES)).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 128)
    window = {**GGUF, "llama.attention.sliding_window": 24}
    spec = spec_from_config(config_from_gguf(window, SHAPES))
    assert spec.family == "mistral" and spec.windows == (24,) * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general.architecture": "mamba"}, "GGUF architecture 'mamba'"),
        ({"llama.expert_count": 8}, "with experts"),
        ({"llama.attention.head_count": [4, 2]}, "differ by layer"),
        ({"llama.attention.value_length": 8}, "unequal key and value"),
        ({"llama.rope.dimension_count": 8}, "part of the head"),
        ({"llama.rope.scaling.type": "longrope"}, "rope type 'longrope'"),
        ({"llama.embedding_length": None}, "lacks llama.attention.head_count or"),
        ({"llama.block_count": None}, "num_hidden_layers"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        spec_from_config(config_from_gguf({**GGUF, **changes}, SHAPES))
