"""SmolLM3: Llama with some layers without rotary embedding."""

from __future__ import annotations

from jaxengine.models.families.common import (
    LAYER_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    layer_kinds,
    need_int,
    windows,
)
from jaxengine.models.spec import DecoderSpec
from jaxengine.weights.errors import UnsupportedModelError


def spec(config: Config) -> DecoderSpec:
    layers = need_int(config, "num_hidden_layers")
    every = config.get("no_rope_layer_interval", 4)
    # The list marks with 1 the layers that have one.
    marks = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if len(marks) != layers:
        raise UnsupportedModelError(f"no_rope_layers must have {layers} entries, not {len(marks)}")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    kinds = layer_kinds(config, lambda i: not marks[i])
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        {"tie_word_embeddings": True, **config},
        "smollm3",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        no_rope_layers=tuple(i for i in range(layers) if not marks[i]),
        windows=windows(
            [window if w else None for w in kinds], need_int(config, "max_position_embeddings")
        ),
    )


FAMILY = Family("smollm3", spec, TOP_NAMES, LAYER_NAMES)
