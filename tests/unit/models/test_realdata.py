"""Published configurations against figures worked out apart from the engine."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest
from testdata import CONFIGS

from jaxengine.models.cache import cache_bytes_per_token
from jaxengine.models.families import spec_from_config, weight_names
from jaxengine.models.layers.rope import inverse_frequencies
from jaxengine.models.params import count_params, layer_leaves, param_shapes, top_leaves
from jaxengine.models.spec import DecoderSpec

NAMES = sorted(p.parent.name for p in CONFIGS.glob("*/config.json"))


def read(name: str, file: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / file).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_figures(name: str) -> None:
    want = read(name, "expected.json")
    spec = spec_from_config(read(name, "config.json"))
    assert (spec.num_layers, spec.vocab_size) == (want["num_layers"], want["vocab_size"])
    assert (spec.num_heads, spec.num_kv_heads) == (want["num_query_heads"], want["num_kv_heads"])
    assert (spec.head_dim, spec.tie_embeddings) == (want["head_dim"], want["tied_embeddings"])
    assert (spec.rope.kind, spec.rope.theta) == (want["rope_type"], want["rope_theta"])
    windowed = [w for w in spec.windows if w]
    assert len(windowed) == want["windowed_layers"]
    assert spec.num_layers - len(windowed) == want["full_attention_layers"]
    assert set(windowed) == ({want["window"]} if windowed else set())
    assert count_params(spec) == (want["param_count"], want["param_count_active_per_token"])
    per_token = cache_bytes_per_token(spec, 2)
    assert per_token == want["kv_bytes_per_token_bf16"]
    for length, size in want["kv_bytes_one_sequence_bf16"].items():
        assert sequence_bytes(spec, per_token, int(length)) == size
    experts = None if spec.moe is None else (spec.moe.num_experts, spec.moe.top_k)
    assert experts == ((want["experts"], want["experts_per_token"]) if want["experts"] else None)
    if "attention_scale" in want:
        assert spec.attention_scale == 256**-0.5
    if "rope_theta_windowed_layers" in want:
        assert spec.window_rope is not None
        assert spec.window_rope.theta == want["rope_theta_windowed_layers"]
    if "mla" in want:
        assert spec.mla is not None
        assert (spec.mla.latent, spec.mla.rope_dim) == (
            want["mla"]["latent_dim"],
            want["mla"]["rope_dim"],
        )
        assert spec.mla.width == want["mla"]["cached_values_per_token_per_layer"]
        assert spec.mla.value_dim == want["mla"]["v_head_dim"]
    if "longrope" in want:
        assert spec.rope.original_max_position == 4096
        assert spec.rope.factor == want["longrope"]["scale"]
        factor = inverse_frequencies(spec.rope, spec.head_dim)[1]
        assert factor == pytest.approx(want["longrope"]["attention_factor"], rel=1e-12)


def sequence_bytes(spec: DecoderSpec, per_token: int, length: int) -> int:
    each = per_token // spec.num_layers
    return sum(each * min(length, w or length) for w in spec.windows or (0,) * spec.num_layers)


@pytest.mark.parametrize("name", NAMES)
def test_every_leaf_has_a_name_and_a_shape(name: str) -> None:
    spec = spec_from_config(read(name, "config.json"))
    for layer in range(spec.num_layers):
        top, names = weight_names(spec, "hf", layer)
        assert top.keys() == top_leaves(spec).keys()
        assert names.keys() == layer_leaves(spec, layer).keys()
        assert all(names.values())
    shapes = param_shapes(spec, "bfloat16")
    assert sum(x.size for x in jax.tree.leaves(shapes)) == count_params(spec)[0]


def test_deepseek_scale_has_yarns_magnitude_squared() -> None:
    spec = spec_from_config(read("DeepSeek-V2-Lite", "config.json"))
    magnitude = 0.1 * 0.707 * 3.6888794541139363 + 1  # log 40
    assert spec.attention_scale == pytest.approx(192**-0.5 * magnitude**2, rel=1e-9)
    assert inverse_frequencies(spec.rope, 64)[1] == pytest.approx(1.0)
    assert spec.dense_layers == (0,) and spec.moe is not None
    assert spec.moe.shared_ffn_size == 2 * 1408


def test_gemma3_with_the_text_model_inside() -> None:
    plain = read("gemma-3-1b-it", "config.json")
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {k: v for k, v in plain.items() if k != "architectures"},
        "vision_config": {"hidden_size": 1152},
    }
    assert spec_from_config(outer) == spec_from_config(plain)
