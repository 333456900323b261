"""Llama 1 to 3.x and models saved in its layout (SmolLM2, TinyLlama, DeepSeek distillations)."""

from __future__ import annotations

from jaxengine.models.families.common import LAYER_NAMES, TOP_NAMES, Config, Family, decoder_spec
from jaxengine.models.spec import DecoderSpec
from jaxengine.weights.errors import UnsupportedModelError


def spec(config: Config) -> DecoderSpec:
    if config.get("rope_interleaved"):
        raise UnsupportedModelError("rope_interleaved is not supported for llama")
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        config,
        "llama",
        qkv_bias=bias,
        o_bias=bool(config.get("attention_out_bias", bias)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


FAMILY = Family("llama", spec, TOP_NAMES, LAYER_NAMES)
