"""The registry of model families: architecture name -> spec function and weight names.

To add a family, write a small file with a Family and enter it below.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.families import (
    deepseek,
    gemma,
    gguf,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo,
    phi3,
    qwen,
    smollm3,
)
from jaxengine.models.families.common import Family, Names
from jaxengine.models.params import layer_leaves, top_leaves
from jaxengine.models.spec import DecoderSpec

__all__ = ["FAMILIES", "UnsupportedModelError", "spec_from_config", "spec_from_gguf"]
__all__ += ["family_of", "weight_names"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma3ForConditionalGeneration": gemma.GEMMA3,
    "Phi3ForCausalLM": phi3.FAMILY,
    "SmolLM3ForCausalLM": smollm3.FAMILY,
    "GraniteForCausalLM": granite.FAMILY,
    "Olmo2ForCausalLM": olmo.OLMO2,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Qwen2MoeForCausalLM": qwen.QWEN2_MOE,
    "Qwen3MoeForCausalLM": qwen.QWEN3_MOE,
    "OlmoeForCausalLM": olmo.OLMOE,
    "DeepseekV2ForCausalLM": deepseek.DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": deepseek.DEEPSEEK_V3,
    "GptOssForCausalLM": gpt_oss.FAMILY,
}
_BY_NAME = {f.name: f for f in FAMILIES.values()}
_MODEL_TYPES = {**_BY_NAME, "gemma3_text": gemma.GEMMA3}


# Their null says "none"; without them the published classes take a number.
_NULL_IS_NONE = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}


def _given(config: Any) -> dict[str, Any]:
    """The fields that say something: null is what an absent field is."""
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"text_config must be an object, not {config!r}")
    return {k: v for k, v in config.items() if v is not None or k in _NULL_IS_NONE}


def spec_from_config(config: dict[str, Any]) -> DecoderSpec:
    """DecoderSpec of a config.json, old or new style, or of one with the text model's inside
    (text_config). Raises UnsupportedModelError."""
    names = config.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise UnsupportedModelError(f"architectures must be a list of names, not {names!r}")
    family = next((FAMILIES[n] for n in names if n in FAMILIES), None)
    if family is None and not names:
        family = _MODEL_TYPES.get(str(config.get("model_type")))
    if family is None:
        what = ", ".join(map(str, names)) or config.get("model_type") or "unnamed"
        known = ", ".join(FAMILIES)
        raise UnsupportedModelError(f"architecture {what} is not supported (known: {known})")
    return family.spec({**_given(config), **_given(config.get("text_config") or {})})


def spec_from_gguf(
    metadata: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    rope_factors: np.ndarray | None = None,
) -> DecoderSpec:
    """DecoderSpec of a GGUF file; see families/gguf.py. Raises UnsupportedModelError."""
    return spec_from_config(gguf.config_from_gguf(metadata, shapes, rope_factors))


def family_of(spec: DecoderSpec) -> Family:
    return _BY_NAME[spec.family]


def weight_names(spec: DecoderSpec, kind: str, layer: int = 0) -> tuple[Names, Names]:
    """(top level, of this layer): leaf -> checkpoint names, of the leaves this spec has.

    `kind` is "hf" or "gguf".
    """
    family = family_of(spec)
    top, names = (
        (gguf.TOP_NAMES, gguf.LAYER_NAMES) if kind == "gguf" else (family.top, family.layer)
    )
    return (
        {leaf: top[leaf] for leaf in top_leaves(spec)},
        {leaf: names[leaf] for leaf in layer_leaves(spec, layer)},
    )
