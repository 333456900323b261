"""gpt-oss: attention sinks, windows on every second layer, biases everywhere, clamped SwiGLU."""

from __future__ import annotations

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.families.common import (
    MOE_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    flag,
    need_int,
    number,
    window_size,
    windows_where,
)
from jaxengine.models.spec import DecoderSpec, MoeSpec

_ALPHA = 1.702


def spec(config: Config) -> DecoderSpec:
    if number(config, "swiglu_alpha", _ALPHA) != _ALPHA:
        raise UnsupportedModelError(f"swiglu_alpha must be {_ALPHA} for gpt_oss")
    bias = flag(config, "attention_bias", True)
    top_k = "num_experts_per_tok" if "num_experts_per_tok" in config else "experts_per_token"
    moe = MoeSpec(
        num_experts=need_int(config, "num_local_experts"),
        top_k=need_int(config, top_k),
        ffn_size=need_int(config, "intermediate_size"),
        scoring="topk_softmax",
        router_bias=True,
        expert_bias=True,
        activation="clamped_swiglu",
        activation_limit=number(config, "swiglu_limit", 7.0),
    )
    return decoder_spec(
        {"rms_norm_eps": 1e-5, "head_dim": 64, "rope_theta": 150000.0, **config},
        "gpt_oss",
        quantized=("mxfp4",),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        windows=windows_where(config, window_size(config, 128), lambda i: i % 2 == 0),
        moe=moe,
    )


_L = "model.layers.{i}."
_NAMES = {
    **MOE_NAMES,
    "sinks": (_L + "self_attn.sinks",),
    "router": (_L + "mlp.router.weight",),
    "router_bias": (_L + "mlp.router.bias",),
    "experts_gate_up": (_L + "mlp.experts.gate_up_proj",),
    "experts_gate_up_bias": (_L + "mlp.experts.gate_up_proj_bias",),
    "experts_down": (_L + "mlp.experts.down_proj",),
    "experts_down_bias": (_L + "mlp.experts.down_proj_bias",),
}
FAMILY = Family(
    "gpt_oss",
    spec,
    TOP_NAMES,
    _NAMES,
    "MXFP4 weights are widened to the model's dtype when loaded",
    stacked_in_out=True,
)
