"""Llama 1 to 3.x and models saved in its layout (SmolLM2, TinyLlama, DeepSeek distillations)."""

from __future__ import annotations

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.families.common import (
    LAYER_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    flag,
    window_size,
    windows_where,
)
from jaxengine.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    if flag(config, "rope_interleaved", False):
        raise UnsupportedModelError("rope_interleaved is not supported for llama")
    bias = flag(config, "attention_bias", False)
    return decoder_spec(
        config,
        "llama",
        qkv_bias=bias,
        o_bias=flag(config, "attention_out_bias", bias),
        mlp_bias=flag(config, "mlp_bias", False),
        windows=windows_where(config, window_size(config), lambda i: False),
    )


FAMILY = Family("llama", spec, TOP_NAMES, LAYER_NAMES)
