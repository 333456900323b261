"""Granite 3: Llama with scaled embeddings, scores, residual sums and logits."""

from __future__ import annotations

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.families.common import (
    LAYER_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    flag,
    number,
)
from jaxengine.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias", False)
    divisor = number(config, "logits_scaling", 1.0)
    if divisor == 0:
        raise UnsupportedModelError("config field logits_scaling must not be 0")
    return decoder_spec(
        config,
        "granite",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        embed_scale=number(config, "embedding_multiplier", 1.0),
        scale=number(config, "attention_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / divisor,
    )


FAMILY = Family("granite", spec, TOP_NAMES, LAYER_NAMES)
