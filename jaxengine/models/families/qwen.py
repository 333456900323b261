"""Qwen2 (bias on q, k, v without any field saying so) and Qwen3 (norm on each q and k head)."""

from __future__ import annotations

from jaxengine.models.families.common import (
    LAYER_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    need_int,
    windows,
)
from jaxengine.models.spec import DecoderSpec
from jaxengine.weights.errors import UnsupportedModelError

_KINDS = ("full_attention", "sliding_attention")


def layer_windows(config: Config) -> tuple[int, ...]:
    """A window only under use_sliding_window, on the layers of layer_types, or else on those from
    max_window_layers up."""
    layers = need_int(config, "num_hidden_layers")
    if not config.get("use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        return ()
    window = config.get("sliding_window", 4096)
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [_KINDS[i >= first] for i in range(layers)]
    if len(kinds) != layers or any(k not in _KINDS for k in kinds):
        raise UnsupportedModelError(f"layer_types must name {layers} layers out of {_KINDS}")
    per_layer = [window if k == "sliding_attention" else None for k in kinds]
    return windows(per_layer, need_int(config, "max_position_embeddings"))


def qwen2(config: Config) -> DecoderSpec:
    return decoder_spec(config, "qwen2", qkv_bias=True, windows=layer_windows(config))


def qwen3(config: Config) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        {"head_dim": 128, **config},
        "qwen3",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=layer_windows(config),
    )


QWEN2 = Family("qwen2", qwen2, TOP_NAMES, LAYER_NAMES)
QWEN3 = Family("qwen3", qwen3, TOP_NAMES, LAYER_NAMES)
