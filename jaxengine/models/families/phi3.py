"""Phi-3, 3.5 and 4 mini: Llama with joined weights, rotary on part of a head, longrope."""

from __future__ import annotations

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.families.common import (
    LAYER_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    flag,
    need_int,
    rope_spec,
    rotary_share,
    window_size,
    windows_where,
)
from jaxengine.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    config = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **config}
    heads, width = need_int(config, "num_attention_heads"), need_int(config, "hidden_size")
    head = width // heads if config.get("head_dim") is None else need_int(config, "head_dim")
    rotary = int(head * rotary_share(config))
    if rotary % 2 or not 0 < rotary <= head:
        raise UnsupportedModelError(f"a rotary width of {rotary} out of {head} is not supported")
    bias = flag(config, "attention_bias", False)
    return decoder_spec(
        config,
        "phi3",
        qkv_bias=bias,
        o_bias=bias,
        rope=rope_spec(config, partial=True),
        rotary_dim=0 if rotary == head else rotary,
        windows=windows_where(config, window_size(config), lambda i: True),
    )


FAMILY = Family(
    "phi3",
    spec,
    TOP_NAMES,
    LAYER_NAMES,
    "longrope: one set of factors for the whole engine, by max_model_len",
)
