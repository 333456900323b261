"""DeepSeek V2 and V3: latent attention, many small experts beside shared ones, groups of experts.

Checkpoints pair neighbouring numbers in the rotary part of q and k (`rotary_pairs`).
"""

from __future__ import annotations

import math
from typing import Any

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.families.common import (
    MOE_NAMES,
    TOP_NAMES,
    Config,
    Family,
    count,
    decoder_spec,
    flag,
    need_int,
    number,
    rope_spec,
)
from jaxengine.models.spec import DecoderSpec, MlaSpec, MoeSpec, RopeSpec
from jaxengine.models.values import switch


def _mla(config: Config) -> MlaSpec:
    if flag(config, "attention_bias", False):
        raise UnsupportedModelError("attention_bias is not supported with latent attention")
    rotary = need_int(config, "qk_rope_head_dim")
    if rotary % 2:
        raise UnsupportedModelError(f"odd qk_rope_head_dim {rotary} has no rotary embedding")
    return MlaSpec(
        latent=need_int(config, "kv_lora_rank"),
        rope_dim=rotary,
        nope_dim=need_int(config, "qk_nope_head_dim"),
        value_dim=need_int(config, "v_head_dim"),
        q_rank=count(config, "q_lora_rank"),
    )


def _scale(mla: MlaSpec, rope: RopeSpec) -> float:
    """Of attention scores: yarn's magnitude enters squared, since q and k each carry it."""
    scale = 1.0 / math.sqrt(mla.nope_dim + mla.rope_dim)
    if rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return scale


def _dense_layers(config: Config) -> tuple[int, ...]:
    layers = need_int(config, "num_hidden_layers")
    first, every = count(config, "first_k_dense_replace"), config.get("moe_layer_freq", 1)
    if isinstance(every, list):  # for each layer, whether it has experts
        marks = [switch(mark) for mark in every]
        if len(marks) != layers or None in marks:
            raise UnsupportedModelError(f"moe_layer_freq must have {layers} entries of 1 or 0")
        return tuple(i for i in range(layers) if i < first or not marks[i])
    every = need_int({"moe_layer_freq": every}, "moe_layer_freq")
    return tuple(i for i in range(layers) if i < first or i % every)


def _experts(config: Config, **how: Any) -> MoeSpec:
    ffn = need_int(config, "moe_intermediate_size")
    groups = count(config, "n_group") or 1
    experts = need_int(config, "n_routed_experts")
    if experts % groups:
        raise UnsupportedModelError(f"{experts} experts do not make {groups} groups")
    return MoeSpec(
        num_experts=experts,
        top_k=need_int(config, "num_experts_per_tok"),
        ffn_size=ffn,
        num_groups=groups,
        top_groups=count(config, "topk_group") or 1,
        shared_ffn_size=ffn * count(config, "n_shared_experts"),
        **how,
    )


def _spec(config: Config, family: str, moe: MoeSpec) -> DecoderSpec:
    mla, rope = _mla(config), rope_spec(config)
    return decoder_spec(
        {**config, "head_dim": mla.nope_dim + mla.rope_dim},
        family,
        num_kv_heads=1,  # one latent for all heads
        rope=rope,
        scale=_scale(mla, rope),
        mla=mla,
        moe=moe,
        dense_layers=_dense_layers(config),
    )


def deepseek_v2(config: Config) -> DecoderSpec:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(f"topk_method {method!r} is not supported for deepseek_v2")
    if config.get("scoring_func", "softmax") != "softmax":
        raise UnsupportedModelError("scoring_func must be softmax for deepseek_v2")
    renormalise = flag(config, "norm_topk_prob", False)
    moe = _experts(
        {**config, "n_group": 1} if method == "greedy" else config,
        renormalise=renormalise,
        group_score="max",
        # The published router scales only what it does not renormalise.
        scale=1.0 if renormalise else number(config, "routed_scaling_factor", 1.0),
    )
    return _spec(config, "deepseek_v2", moe)


def deepseek_v3(config: Config) -> DecoderSpec:
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        raise UnsupportedModelError("scoring_func must be sigmoid for deepseek_v3")
    if config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise UnsupportedModelError("topk_method must be noaux_tc for deepseek_v3")
    if not flag(config, "rope_interleave", True):
        raise UnsupportedModelError("rope_interleave false is not supported for deepseek_v3")
    moe = _experts(
        config,
        scoring="sigmoid",
        renormalise=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 2.5),
        choice_bias=True,
    )
    return _spec(config, "deepseek_v3", moe)


_ATTN = "model.layers.{i}.self_attn."
_NAMES = {
    **MOE_NAMES,
    "choice_bias": ("model.layers.{i}.mlp.gate.e_score_correction_bias",),
    "q": (_ATTN + "q_proj.weight",),
    "q_a": (_ATTN + "q_a_proj.weight",),
    "q_a_norm": (_ATTN + "q_a_layernorm.weight",),
    "q_b": (_ATTN + "q_b_proj.weight",),
    "kv_a": (_ATTN + "kv_a_proj_with_mqa.weight",),
    "kv_a_norm": (_ATTN + "kv_a_layernorm.weight",),
    "kv_b": (_ATTN + "kv_b_proj.weight",),
}
DEEPSEEK_V2 = Family("deepseek_v2", deepseek_v2, TOP_NAMES, _NAMES, rotary_pairs=True)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    deepseek_v3,
    TOP_NAMES,
    _NAMES,
    "no fp8 checkpoints; one multi-token-prediction layer is read, for drafts",
    rotary_pairs=True,
)
