"""Gemma 2 and the text model of Gemma 3: norms before and after, 1 + weight, tanh GELU, scaled
embeddings, windows on most layers; Gemma 2 caps scores and logits, Gemma 3 norms q and k and
rotates windowed layers by a base of their own."""

from __future__ import annotations

import math
from typing import Any

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.families.common import (
    LAYER_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    flag,
    need_int,
    number,
    rope_spec,
    window_size,
    windows_where,
)
from jaxengine.models.spec import DecoderSpec, RopeSpec

# Fields that published files leave to the configuration class.
_DEFAULTS: Config = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_GEMMA2: Config = {**_DEFAULTS, "max_position_embeddings": 8192}
_GEMMA3: Config = {
    **_DEFAULTS,
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
}


def _shared(config: Config) -> dict[str, Any]:
    if flag(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError("use_bidirectional_attention is not supported")
    bias = flag(config, "attention_bias", False)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "post_norm": True,
        "norm_plus_one": True,
        "embed_scale": math.sqrt(need_int(config, "hidden_size")),
        "scale": number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "soft_cap": number(config, "attn_logit_softcapping", 0.0),
        "logit_soft_cap": number(config, "final_logit_softcapping", 0.0),
    }


def gemma2(config: Config) -> DecoderSpec:
    config = {**_GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
    where = windows_where(config, window_size(config), lambda i: i % 2 == 0)
    return decoder_spec(config, "gemma2", windows=where, **_shared(config))


def gemma3(config: Config) -> DecoderSpec:
    config = {**_GEMMA3, **config}
    plain, saved = "sliding_window_pattern", "_sliding_window_pattern"
    every = need_int({saved: 6, **config}, plain if plain in config else saved)
    full, local = _ropes(config)
    return decoder_spec(
        config,
        "gemma3",
        qk_norm=True,
        windows=windows_where(config, window_size(config), lambda i: (i + 1) % every != 0),
        rope=full,
        window_rope=local,
        **_shared(config),
    )


def _ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """Of full and of windowed layers, in the new style (by layer type) or the old."""
    by_kind = config.get("rope_parameters") or {}
    plain = {**config, "rope_scaling": None, "rope_parameters": None}
    plain["rope_theta"] = config.get("rope_local_base_freq", 10000.0)
    kinds = ("full_attention", "sliding_attention")
    if isinstance(by_kind, dict) and any(k in by_kind for k in kinds):
        missing = [k for k in kinds if not isinstance(by_kind.get(k), dict)]
        if missing:
            raise UnsupportedModelError(f"rope_parameters lacks {missing[0]}")
        full = {**config, "rope_parameters": by_kind["full_attention"]}
        local = {**plain, "rope_parameters": by_kind["sliding_attention"]}
        return rope_spec(full), rope_spec(local)
    return rope_spec(config), rope_spec(plain)


_L = "model.layers.{i}."
_NAMES = {
    **LAYER_NAMES,
    "attn_post_norm": (_L + "post_attention_layernorm.weight",),
    "mlp_norm": (_L + "pre_feedforward_layernorm.weight",),
    "mlp_post_norm": (_L + "post_feedforward_layernorm.weight",),
}
GEMMA2 = Family("gemma2", gemma2, TOP_NAMES, _NAMES)
GEMMA3 = Family("gemma3", gemma3, TOP_NAMES, _NAMES, "text only: images are not read")
