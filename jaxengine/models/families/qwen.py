"""Qwen2 (bias on q, k, v without any field saying so), Qwen3 (norm on each q and k head), and
their mixtures of experts."""

from __future__ import annotations

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.families.common import (
    LAYER_NAMES,
    MOE_NAMES,
    TOP_NAMES,
    Config,
    Family,
    count,
    decoder_spec,
    flag,
    need_int,
    window_size,
    windows_where,
)
from jaxengine.models.spec import DecoderSpec, MoeSpec
from jaxengine.models.values import integer


def layer_windows(config: Config) -> tuple[int, ...]:
    """A window only under use_sliding_window, on the layers of layer_types, or else on those from
    max_window_layers up."""
    window = window_size(config, 4096) if flag(config, "use_sliding_window", False) else None
    first = count(config, "max_window_layers", 28)
    return windows_where(config, window, lambda i: i >= first)


def dense_layers(config: Config) -> tuple[int, ...]:
    """Layers with a plain MLP: those of mlp_only_layers, and by decoder_sparse_step."""
    step = need_int({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(integer(i) is None for i in named):
        raise UnsupportedModelError(f"mlp_only_layers must be a list of layers, not {named!r}")
    layers = range(need_int(config, "num_hidden_layers"))
    return tuple(i for i in layers if i in named or (i + 1) % step)


def qwen2(config: Config) -> DecoderSpec:
    return decoder_spec(config, "qwen2", qkv_bias=True, windows=layer_windows(config))


def qwen3(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias", False)
    return decoder_spec(
        {"head_dim": 128, **config},
        "qwen3",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=layer_windows(config),
    )


def qwen2_moe(config: Config) -> DecoderSpec:
    moe = MoeSpec(
        num_experts=need_int(config, "num_experts"),
        top_k=need_int(config, "num_experts_per_tok"),
        ffn_size=need_int(config, "moe_intermediate_size"),
        renormalise=flag(config, "norm_topk_prob", False),
        shared_ffn_size=need_int(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return decoder_spec(
        config,
        "qwen2_moe",
        qkv_bias=flag(config, "qkv_bias", True),
        windows=layer_windows(config),
        moe=moe,
        dense_layers=dense_layers(config),
    )


def qwen3_moe(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias", False)
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    moe = MoeSpec(
        num_experts=need_int(config, experts),
        top_k=need_int(config, "num_experts_per_tok"),
        ffn_size=need_int(config, "moe_intermediate_size"),
        renormalise=flag(config, "norm_topk_prob", False),
    )
    return decoder_spec(
        config,
        "qwen3_moe",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=layer_windows(config),
        moe=moe,
        dense_layers=dense_layers(config),
    )


_SHARED = "model.layers.{i}.mlp.shared_expert."
_QWEN2_MOE_NAMES = {
    **MOE_NAMES,
    "shared_gate_up": (_SHARED + "gate_proj.weight", _SHARED + "up_proj.weight"),
    "shared_down": (_SHARED + "down_proj.weight",),
    "shared_gate": ("model.layers.{i}.mlp.shared_expert_gate.weight",),
}

QWEN2 = Family("qwen2", qwen2, TOP_NAMES, LAYER_NAMES)
QWEN3 = Family("qwen3", qwen3, TOP_NAMES, LAYER_NAMES)
QWEN2_MOE = Family("qwen2_moe", qwen2_moe, TOP_NAMES, _QWEN2_MOE_NAMES)
QWEN3_MOE = Family("qwen3_moe", qwen3_moe, TOP_NAMES, MOE_NAMES)
