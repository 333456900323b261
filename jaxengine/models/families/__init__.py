"""The registry of model families: architecture name -> spec function and weight names.

To add a family, write a small file with a Family and enter it below.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxengine.models.families import gguf, llama, mistral, qwen
from jaxengine.models.families.common import Family, Names
from jaxengine.models.spec import DecoderSpec
from jaxengine.weights.errors import UnsupportedModelError

__all__ = ["FAMILIES", "UnsupportedModelError", "spec_from_config", "spec_from_gguf"]
__all__ += ["weight_names"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
}
_MODEL_TYPES = {f.name: f for f in FAMILIES.values()}


def spec_from_config(config: dict[str, Any]) -> DecoderSpec:
    """DecoderSpec of a config.json, old or new style. Raises UnsupportedModelError."""
    names = config.get("architectures") or []
    family = next((FAMILIES[n] for n in names if n in FAMILIES), None)
    if family is None and not names:
        family = _MODEL_TYPES.get(str(config.get("model_type")))
    if family is None:
        what = ", ".join(map(str, names)) or config.get("model_type") or "unnamed"
        known = ", ".join(FAMILIES)
        raise UnsupportedModelError(f"architecture {what} is not supported (known: {known})")
    return family.spec(config)


def spec_from_gguf(
    metadata: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    rope_factors: np.ndarray | None = None,
) -> DecoderSpec:
    """DecoderSpec of a GGUF file; see families/gguf.py. Raises UnsupportedModelError."""
    return spec_from_config(gguf.config_from_gguf(metadata, shapes, rope_factors))


def weight_names(spec: DecoderSpec, kind: str) -> tuple[Names, Names]:
    """(top level, per layer): leaf -> checkpoint names, of the leaves this spec has.

    `kind` is "hf" or "gguf". Absent leaves (no bias, tied head) are left out.
    """
    family = _MODEL_TYPES[spec.family]
    top, layer = (
        (gguf.TOP_NAMES, gguf.LAYER_NAMES) if kind == "gguf" else (family.top, family.layer)
    )
    absent = {"head"} if spec.tie_embeddings else set()
    for present, leaves in (
        (spec.qkv_bias, {"qkv_bias"}),
        (spec.o_bias, {"o_bias"}),
        (spec.mlp_bias, {"gate_up_bias", "down_bias"}),
        (spec.qk_norm, {"q_norm", "k_norm"}),
    ):
        absent |= set() if present else leaves
    return (
        {leaf: names for leaf, names in top.items() if leaf not in absent},
        {leaf: names for leaf, names in layer.items() if leaf not in absent},
    )
