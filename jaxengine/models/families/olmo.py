"""OLMo 2 (norms after attention and MLP only, one norm over all q and all k heads) and OLMoE."""

from __future__ import annotations

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.families.common import (
    LAYER_NAMES,
    MOE_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    flag,
    need_int,
)
from jaxengine.models.spec import DecoderSpec, MoeSpec


def olmo2(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias", False)
    return decoder_spec(
        {"rms_norm_eps": 1e-5, **config},
        "olmo2",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm_wide=True,
        pre_norm=False,
        post_norm=True,
    )


def olmoe(config: Config) -> DecoderSpec:
    if config.get("clip_qkv") is not None:
        raise UnsupportedModelError("clip_qkv is not supported for olmoe")
    bias = flag(config, "attention_bias", False)
    moe = MoeSpec(
        num_experts=need_int(config, "num_experts"),
        top_k=need_int(config, "num_experts_per_tok"),
        ffn_size=need_int(config, "intermediate_size"),
        renormalise=flag(config, "norm_topk_prob", False),
    )
    return decoder_spec(
        {"rms_norm_eps": 1e-5, **config},
        "olmoe",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm_wide=True,
        moe=moe,
    )


_L = "model.layers.{i}."
_OLMO2_NAMES = {
    **LAYER_NAMES,
    "attn_post_norm": (_L + "post_attention_layernorm.weight",),
    "mlp_post_norm": (_L + "post_feedforward_layernorm.weight",),
}
OLMO2 = Family("olmo2", olmo2, TOP_NAMES, _OLMO2_NAMES)
OLMOE = Family("olmoe", olmoe, TOP_NAMES, MOE_NAMES, "no clip_qkv")
