"""config.json in its other legal forms: the same model as in the plain one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from testdata import GOLDENS

from jaxengine.models.families import UnsupportedModelError, spec_from_config
from jaxengine.models.spec import DecoderSpec, RopeSpec

NAMES = sorted(p.parent.name for p in GOLDENS.glob("*/config.json"))

# Keys with a default. Their null is what their absence is in the published classes too.
OPTIONAL = (
    "_sliding_window_pattern attention_bias attention_multiplier attention_out_bias "
    "decoder_sparse_step embedding_multiplier experts_per_token first_k_dense_replace head_dim "
    "hidden_act hidden_activation layer_types logits_scaling max_window_layers mlp_bias "
    "mlp_only_layers moe_layer_freq n_group n_shared_experts no_rope_layer_interval "
    "no_rope_layers norm_topk_prob num_key_value_heads original_max_position_embeddings "
    "partial_rotary_factor q_lora_rank qkv_bias quantization_config query_pre_attn_scalar "
    "residual_multiplier rms_norm_eps rope_interleave rope_interleaved rope_local_base_freq "
    "rope_parameters rope_scaling rope_theta routed_scaling_factor scoring_func "
    "sliding_window_pattern swiglu_alpha swiglu_limit text_config tie_word_embeddings "
    "topk_group topk_method use_bidirectional_attention use_sliding_window"
).split()


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((GOLDENS / name / "config.json").read_text()), **changes}


def spec(name: str, **changes: Any) -> DecoderSpec:
    return spec_from_config(config(name, **changes))


@pytest.mark.parametrize("name", NAMES)
def test_null_is_absent(name: str) -> None:
    for key in OPTIONAL:
        without = config(name)
        without.pop(key, None)
        assert spec(name, **{key: None}) == spec_from_config(without), key


@pytest.mark.parametrize("name", NAMES)
def test_null_inside_of_rotary_settings(name: str) -> None:
    plain = config(name)
    for field in ("rope_parameters", "rope_scaling"):
        for key in ("factor", "rope_type", "rope_theta", "partial_rotary_factor", "truncate"):
            settings = plain.get(field) or {}
            if key in settings and key not in ("factor", "rope_type"):
                without = {k: v for k, v in settings.items() if k != key}
                got = spec(name, **{field: {**settings, key: None}})
                assert got == spec(name, **{field: without}), key
            elif key not in settings and "full_attention" not in settings:
                assert spec(name, **{field: {**settings, key: None}}) == spec(name), key


def test_null_says_none_where_absence_is_a_number() -> None:
    absent = config("mistral-window", max_position_embeddings=32768)
    del absent["sliding_window"]
    assert spec_from_config(absent).windows == (4096,) * 3
    assert spec("mistral-window", sliding_window=None).windows == ()
    gemma = config("gemma2")
    del gemma["attn_logit_softcapping"], gemma["final_logit_softcapping"]
    assert spec_from_config(gemma).soft_cap == 50 and spec_from_config(gemma).logit_soft_cap == 30
    none = spec("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert none.soft_cap == 0 == none.logit_soft_cap


@pytest.mark.parametrize("name", NAMES)
def test_whole_numbers_as_floats(name: str) -> None:
    """4096.0 is 4096, everywhere, and the model's sizes stay integers."""

    def as_float(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: as_float(v) for k, v in value.items()}
        if isinstance(value, list):
            return [as_float(v) for v in value]
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    got = spec_from_config(as_float(config(name)))
    assert got == spec(name)
    for field in dataclasses.fields(got):
        if isinstance(getattr(spec(name), field.name), int):
            assert isinstance(getattr(got, field.name), int), field.name
    assert all(isinstance(w, int) for w in got.windows)


@pytest.mark.parametrize("name", NAMES)
def test_a_list_that_repeats_one_number(name: str) -> None:
    plain = config(name)
    layers = plain["num_hidden_layers"]
    for key in ("num_key_value_heads", "intermediate_size", "num_attention_heads", "head_dim"):
        if plain.get(key) is not None:
            for count in (1, layers):
                assert spec(name, **{key: [plain[key]] * count}) == spec(name), key
            differ = [plain[key]] * (layers - 1) + [plain[key] * 2]
            if not (key == "head_dim" and plain.get("kv_lora_rank")):  # there it is a sum
                with pytest.raises(UnsupportedModelError, match=f"{key} has values that differ by"):
                    spec(name, **{key: differ})
    with pytest.raises(UnsupportedModelError, match=f"size has 2 entries for {layers} layers"):
        spec(name, hidden_size=[64, 64])
    with pytest.raises(UnsupportedModelError, match="size has 0 entries"):
        spec(name, hidden_size=[])


@pytest.mark.parametrize("value", [None, 0, -1, False, -1.0, 0.0])
@pytest.mark.parametrize("name", ["mistral-window", "mixtral", "phi3", "gpt-oss", "gemma2"])
def test_no_window(name: str, value: Any) -> None:
    assert spec(name, sliding_window=value).windows == ()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3-moe", "smollm3"])
def test_windows_only_when_switched_on(name: str) -> None:
    layers = config(name)["num_hidden_layers"]
    kinds = ["sliding_attention"] * layers
    for off in (False, None, 0):
        assert spec(name, sliding_window=8, use_sliding_window=off, layer_types=kinds).windows == ()
    for on in (True, 1):
        got = spec(name, sliding_window=8.0, use_sliding_window=on, layer_types=kinds)
        assert got.windows == (8,) * layers
        got = spec(name, sliding_window=0, use_sliding_window=on, layer_types=kinds)
        assert got.windows == ()


@pytest.mark.parametrize("name", ["llama", "mistral-window", "mixtral", "phi3"])
def test_layer_types_say_where_windows_are(name: str) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert spec(name, sliding_window=24, layer_types=kinds).windows == (24, 0, 24)
    assert spec(name, sliding_window=24, layer_types=["full_attention"] * 3).windows == ()
    with pytest.raises(UnsupportedModelError, match="layer_types must name 3 layers"):
        spec(name, layer_types=["chunked_attention"] * 3)
    with pytest.raises(UnsupportedModelError, match="layer_types must name 3 layers"):
        spec(name, layer_types=3)


def test_layer_types_where_there_are_no_windows() -> None:
    assert spec("granite", layer_types=["full_attention"] * 3) == spec("granite")
    with pytest.raises(UnsupportedModelError, match="layer_types with windows .* granite"):
        spec("granite", sliding_window=8, layer_types=["sliding_attention"] * 3)


@pytest.mark.parametrize("act", ["silu", "swish", "SiLU"])
def test_names_of_silu(act: str) -> None:
    assert spec("llama", hidden_act=act) == spec("llama")


@pytest.mark.parametrize(
    "act", ["gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"]
)
def test_names_of_tanh_gelu(act: str) -> None:
    assert spec("llama", hidden_act=act).activation == "gelu"
    assert spec("gemma3", hidden_activation=act) == spec("gemma3")


@pytest.mark.parametrize("act", ["gelu", "relu", 3, ["silu"]])
def test_other_activations_differ(act: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_act .* is not supported for llama"):
        spec("llama", hidden_act=act)


def test_gemmas_null_activation_is_its_own() -> None:
    """The exact GELU of hidden_act is not what these models compute."""
    for other in ({}, {"hidden_act": "gelu"}, {"hidden_act": None}):
        assert spec("gemma2", hidden_activation=None, **other) == spec("gemma2")


def test_names_of_the_architecture() -> None:
    want = spec("qwen2")
    for names in (None, [], "Qwen2ForCausalLM", ["Custom", "Qwen2ForCausalLM"]):
        assert spec("qwen2", architectures=names) == want
    for model_type in (None, "anything"):
        assert spec("qwen2", model_type=model_type) == want
    for wrong in (3, [3], {"a": 1}, [None]):
        with pytest.raises(UnsupportedModelError, match="architectures must be a list of names"):
            spec("qwen2", architectures=wrong)


@pytest.mark.parametrize("name", NAMES)
def test_model_type_alone_is_enough(name: str) -> None:
    assert spec(name, architectures=None) == spec(name)


@pytest.mark.parametrize("name", NAMES)
def test_text_model_inside(name: str) -> None:
    inner = config(name)
    outer = {"architectures": inner.pop("architectures"), "text_config": inner}
    assert spec_from_config(outer) == spec(name)
    with pytest.raises(UnsupportedModelError, match="text_config must be an object, not 'x'"):
        spec(name, text_config="x")


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "smollm3", "mixtral"])
@pytest.mark.parametrize(
    "none",
    [{}, {"type": "default"}, {"rope_type": "default"}, {"type": None}, {"type": "none"},
     {"type": "linear", "factor": 1.0}, {"type": "dynamic", "factor": 1},
     {"type": "mrope", "mrope_section": [2, 3, 3]}],
)  # fmt: skip
def test_ways_to_say_no_scaling(name: str, none: dict[str, Any]) -> None:
    plain = config(name)
    theta = spec(name).rope.theta
    plain.pop("rope_parameters", None)
    for form in (
        {"rope_theta": theta, "rope_scaling": none},
        {"rope_theta": int(theta), "rope_scaling": none},
        {"rope_parameters": {**none, "rope_theta": theta}},
        {"rope_parameters": {"rope_theta": theta}, "rope_scaling": none},
        {"rope_parameters": None, "rope_scaling": none, "rope_theta": theta},
    ):
        assert spec_from_config({**plain, "rope_scaling": None, **form}) == spec(name), form


def test_scaling_added_by_hand_to_a_new_file() -> None:
    """Guides tell users to add rope_scaling; a file of the new style keeps its rope_parameters."""
    for kind in ("type", "rope_type"):
        asked = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        want = RopeSpec(theta=5e5, kind="yarn", factor=4.0, original_max_position=128)
        for own in ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}):
            assert spec("llama", rope_parameters=own, rope_scaling=asked).rope == want
    gemma = spec("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (gemma.rope.kind, gemma.rope.factor, gemma.rope.theta) == ("linear", 8.0, 1e6)
    assert gemma.window_rope == spec("gemma3").window_rope


def test_bases_that_the_published_classes_take() -> None:
    for name, theta in (("mixtral", 1e6), ("smollm3", 2e6), ("gpt-oss", 150000.0), ("llama", 1e4)):
        for given in ({}, {"rope_theta": None}):
            plain = config(name, rope_parameters=None, rope_scaling=None)
            plain.pop("rope_theta", None)
            assert spec_from_config({**plain, **given}).rope.theta == theta
    old = config("gemma3", rope_parameters=None, rope_theta=None, rope_local_base_freq=None)
    got = spec_from_config(old)
    assert got.window_rope is not None
    assert (got.rope.theta, got.window_rope.theta) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_theta": "10000"}, "rope_theta must be a number, not '10000'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number"),
        ({"rope_theta": 0}, "theta must not be 0"),
        ({"rope_scaling": "linear"}, "config field rope_scaling must be an object"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope type .* is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must not be 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"attention_bias": "false"}, "attention_bias must be true or false, not 'false'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"hidden_size": 64.5}, "hidden_size must be a positive integer, not 64.5"),
        ({"hidden_size": True}, "hidden_size must be a positive integer, not True"),
        ({"num_hidden_layers": [3, 3]}, "num_hidden_layers has 2 entries"),
        ({"quantization_config": {"bits": 4}}, r"quantized checkpoint \(unknown\)"),
        ({"quantization_config": {"quant_method": None, "bits": 4}}, r"checkpoint \(unknown\)"),
    ],
)
def test_what_differs_is_refused(changes: dict[str, Any], reason: str) -> None:
    plain = config("llama")
    plain.pop("rope_parameters")
    with pytest.raises(UnsupportedModelError, match=reason):
        spec_from_config({**plain, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("qwen2", {"max_window_layers": -1}, "max_window_layers must be 0 or more"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ("mistral-window", {"sliding_window": "24"}, "sliding_window must be a number"),
        ("mistral-window", {"sliding_window": [24, 0, 24]}, "sliding_window .* differ by layer"),
        ("qwen3-moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive"),
        ("smollm3", {"no_rope_layers": 4}, "no_rope_layers must be a list"),
        ("deepseek-v2", {"moe_layer_freq": 0}, "moe_layer_freq must be a positive integer"),
        ("deepseek-v2", {"moe_layer_freq": [0, 1]}, "moe_layer_freq must have 3 entries"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave false is not supported"),
        ("gemma3", {"rope_parameters": 3}, "config field rope_parameters must be an object"),
    ],
)
def test_what_differs_is_refused_by_field(name: str, changes: dict[str, Any], reason: str) -> None:
    plain = config(name)
    if "no_rope_layer_interval" in changes:
        plain.pop("no_rope_layers")
    with pytest.raises(UnsupportedModelError, match=reason):
        spec_from_config({**plain, **changes})


def test_experts_by_layer() -> None:
    assert spec("deepseek-v2", first_k_dense_replace=0, moe_layer_freq=[0, 1, 1]).dense_layers == (
        spec("deepseek-v2").dense_layers
    )
