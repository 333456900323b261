"""SmolLM3: Llama with some layers without rotary embedding."""

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
    window_size,
    windows_where,
)
from jaxengine.models.spec import DecoderSpec
from jaxengine.models.values import switch


def spec(config: Config) -> DecoderSpec:
    layers = need_int(config, "num_hidden_layers")
    every = need_int({"no_rope_layer_interval": 4, **config}, "no_rope_layer_interval")
    # The list marks with 1 the layers that have one.
    marks = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(marks, list) or any(switch(mark) is None for mark in marks):
        raise UnsupportedModelError(f"no_rope_layers must be a list of 1 and 0, not {marks!r}")
    if len(marks) != layers:
        raise UnsupportedModelError(f"no_rope_layers must have {layers} entries, not {len(marks)}")
    window = window_size(config) if flag(config, "use_sliding_window", False) else None
    bias = flag(config, "attention_bias", False)
    return decoder_spec(
        {"tie_word_embeddings": True, "rope_theta": 2e6, **config},
        "smollm3",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        no_rope_layers=tuple(i for i in range(layers) if not marks[i]),
        windows=windows_where(config, window, lambda i: not marks[i]),
    )


FAMILY = Family("smollm3", spec, TOP_NAMES, LAYER_NAMES)
