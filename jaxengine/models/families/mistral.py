"""Mistral: Llama with a sliding window on every layer (`sliding_window: null` is none)."""

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

_WINDOW_WHEN_ABSENT = 4096  # the published configuration class's default


def spec(config: Config) -> DecoderSpec:
    window = config.get("sliding_window", _WINDOW_WHEN_ABSENT)
    layers, longest = (
        need_int(config, "num_hidden_layers"),
        need_int(config, "max_position_embeddings"),
    )
    return decoder_spec(config, "mistral", windows=windows([window] * layers, longest))


FAMILY = Family("mistral", spec, TOP_NAMES, LAYER_NAMES)
