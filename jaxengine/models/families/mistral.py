"""Mistral: Llama with a sliding window on every layer (`sliding_window: null` is none)."""

from __future__ import annotations

from jaxengine.models.families.common import (
    LAYER_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    window_size,
    windows_where,
)
from jaxengine.models.spec import DecoderSpec

_WINDOW_WHEN_ABSENT = 4096  # the published configuration class's default


def spec(config: Config) -> DecoderSpec:
    window = window_size(config, _WINDOW_WHEN_ABSENT)
    return decoder_spec(config, "mistral", windows=windows_where(config, window, lambda i: True))


FAMILY = Family("mistral", spec, TOP_NAMES, LAYER_NAMES)
