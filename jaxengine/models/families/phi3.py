"""Phi-3, 3.5 and 4 mini: Llama with joined weights, rotary on part of a head, longrope."""

from __future__ import annotations

from jaxengine.models.families.common import (
    LAYER_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    need_int,
    rope_spec,
    rotary_share,
    windows,
)
from jaxengine.models.spec import DecoderSpec
from jaxengine.weights.errors import UnsupportedModelError


def spec(config: Config) -> DecoderSpec:
    layers = need_int(config, "num_hidden_layers")
    longest = need_int(config, "max_position_embeddings")
    head = config.get("head_dim") or need_int(config, "hidden_size") // need_int(
        config, "num_attention_heads"
    )
    rotary = int(head * rotary_share(config))
    if rotary % 2 or not 0 < rotary <= head:
        raise UnsupportedModelError(f"a rotary width of {rotary} out of {head} is not supported")
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        {"rms_norm_eps": 1e-5, **config},
        "phi3",
        qkv_bias=bias,
        o_bias=bias,
        rope=rope_spec(config, partial=True),
        rotary_dim=0 if rotary == head else rotary,
        windows=windows([config.get("sliding_window")] * layers, longest),
    )


FAMILY = Family(
    "phi3",
    spec,
    TOP_NAMES,
    LAYER_NAMES,
    "longrope: one set of factors for the whole engine, by max_model_len",
)
