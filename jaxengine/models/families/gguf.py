"""GGUF metadata as the configuration that families read, and GGUF tensor names.

Only keys differ between the two formats, so a family needs no code of its own for GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.models.families.common import Config, Names
from jaxengine.models.values import integer, one_for_all, switch

# general.architecture -> Hugging Face architecture
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# converters reorder the rows of q and k for these
PERMUTED = frozenset({"llama"})

_BLK = "blk.{i}."
TOP_NAMES: Names = {
    "embed": ("token_embd.weight",),
    "final_norm": ("output_norm.weight",),
    "head": ("output.weight",),
}
LAYER_NAMES: Names = {
    "attn_norm": (_BLK + "attn_norm.weight",),
    "qkv": (_BLK + "attn_q.weight", _BLK + "attn_k.weight", _BLK + "attn_v.weight"),
    "qkv_bias": (_BLK + "attn_q.bias", _BLK + "attn_k.bias", _BLK + "attn_v.bias"),
    "q_norm": (_BLK + "attn_q_norm.weight",),
    "k_norm": (_BLK + "attn_k_norm.weight",),
    "o": (_BLK + "attn_output.weight",),
    "o_bias": (_BLK + "attn_output.bias",),
    "mlp_norm": (_BLK + "ffn_norm.weight",),
    "gate_up": (_BLK + "ffn_gate.weight", _BLK + "ffn_up.weight"),
    "gate_up_bias": (_BLK + "ffn_gate.bias", _BLK + "ffn_up.bias"),
    "down": (_BLK + "ffn_down.weight",),
    "down_bias": (_BLK + "ffn_down.bias",),
}
ROPE_FACTORS = "rope_freqs.weight"
_PATTERN = "attention.sliding_window_pattern"


@dataclass(frozen=True)
class _Keys:
    """Metadata of the architecture, by keys without its prefix, in any legal form."""

    metadata: dict[str, Any]
    prefix: str

    def get(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.prefix}.{key}")
        return default if value is None else value

    def count(self, key: str, layers: int | None = None) -> int | None:
        """A whole number, perhaps one for each layer; None when absent."""
        given = self.get(key)
        value = integer(one_for_all(given, layers, f"GGUF key {self.prefix}.{key}"))
        if given is not None and value is None:
            raise self.wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        return float(value)

    def per_layer(self, key: str, layers: int) -> list[int]:
        """Whole numbers for all layers, given as one or as a list."""
        value = self.get(key)
        found = [integer(v) for v in (value if isinstance(value, list) else [value] * layers)]
        if len(found) != layers or None in found:
            raise self.wrong(key, f"a whole number, or one for each of {layers} layers")
        return [n for n in found if n is not None]

    def wrong(self, key: str, kind: str) -> UnsupportedModelError:
        shown = repr(self.get(key))[:60]
        return UnsupportedModelError(f"GGUF key {self.prefix}.{key} must be {kind}, not {shown}")


def architecture(metadata: dict[str, Any]) -> str | None:
    """general.architecture as the table spells it; None for one that is not in the table."""
    given = metadata.get("general.architecture")
    name = given.strip().lower() if isinstance(given, str) else None
    return name if name in ARCHITECTURES else None


def config_from_gguf(
    metadata: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    rope_factors: np.ndarray | None = None,
) -> Config:
    """The config.json that this file's model would have.

    `shapes` are all tensors (biases and tied embeddings show only there); `rope_factors` is the
    tensor rope_freqs.weight, [C / 2], which holds Llama 3's rotary scaling.
    """
    written, arch = metadata.get("general.architecture"), architecture(metadata)
    if arch is None:
        raise UnsupportedModelError(f"GGUF architecture {written!r} is not supported")
    keys = _Keys(metadata, str(written).strip())
    if keys.count("expert_count"):
        raise UnsupportedModelError(f"GGUF architecture {arch} with experts is not supported")
    if switch(keys.get("attention.causal", True)) is not True:
        raise UnsupportedModelError("GGUF without causal attention is not supported")
    layers = keys.count("block_count")
    if not layers:
        raise UnsupportedModelError(f"GGUF lacks {arch}.block_count (num_hidden_layers)")
    heads = keys.count("attention.head_count", layers)
    width = keys.count("embedding_length")
    if not heads or not width:
        raise UnsupportedModelError(f"GGUF lacks {arch}.attention.head_count or .embedding_length")
    context = keys.count("context_length")
    if not context:
        raise UnsupportedModelError(f"GGUF lacks {arch}.context_length")
    head_dim = keys.count("attention.key_length", layers) or width // heads
    if keys.count("attention.value_length", layers) not in (None, head_dim):
        raise UnsupportedModelError("GGUF with unequal key and value widths is not supported")
    if keys.count("rope.dimension_count", layers) not in (None, head_dim):
        raise UnsupportedModelError("GGUF with rotary on a part of the head is not supported")
    if "token_embd.weight" not in shapes:
        raise ModelLoadError("GGUF lacks tensor token_embd.weight")
    theta = keys.number("rope.freq_base", 10000.0)
    return {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", layers),
        "head_dim": head_dim,
        "intermediate_size": keys.count("feed_forward_length", layers),
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": {"rope_theta": theta, **_rope_parameters(keys, theta, rope_factors)},
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "attention_out_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        **_windows(keys, arch, layers, context),
    }


def _windows(keys: _Keys, arch: str, layers: int, context: int) -> Config:
    """Fields for windows: one size or one for each layer, on the layers of the pattern."""
    key = "attention.sliding_window"
    if keys.get(key) is None:
        return {"sliding_window": None}
    where = _windowed_layers(keys, layers)
    sizes = [n if w else 0 for n, w in zip(keys.per_layer(key, layers), where, strict=True)]
    used = {n for n in sizes if 0 < n < context}
    if not used:
        return {"sliding_window": None}
    if len(used) > 1:
        raise UnsupportedModelError(f"GGUF key {keys.prefix}.{key} has sizes that differ by layer")
    if keys.get("rope.freq_base_swa", keys.get("rope.freq_base")) != keys.get("rope.freq_base"):
        raise UnsupportedModelError(f"GGUF key {keys.prefix}.rope.freq_base_swa is not supported")
    if arch != "llama" and keys.get(_PATTERN) is None:
        raise UnsupportedModelError(f"GGUF architecture {arch} with a sliding window")
    fields: Config = {"architectures": ["MistralForCausalLM"]} if arch == "llama" else {}
    kinds = ["sliding_attention" if n in used else "full_attention" for n in sizes]
    return fields | {
        "sliding_window": used.pop(),
        "use_sliding_window": True,
        "layer_types": kinds,
    }


def _windowed_layers(keys: _Keys, layers: int) -> list[bool]:
    """The pattern: for each layer whether it has a window, or every how many layers one has none;
    without one (and with 0) all have."""
    given = keys.get(_PATTERN)
    if not isinstance(given, list):
        every = keys.count(_PATTERN) or 0
        return [not every or i % every < every - 1 for i in range(layers)]
    marks = [switch(mark) for mark in given]
    if len(marks) != layers or None in marks:
        raise keys.wrong(_PATTERN, f"a switch for each of {layers} layers")
    return [bool(mark) for mark in marks]


def _rope_parameters(keys: _Keys, theta: float, factors: np.ndarray | None) -> Config:
    kind = str(keys.get("rope.scaling.type", "")).lower()
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    neutral: dict[str, tuple[float, ...]] = {"attn_factor": (1.0,)}
    if kind == "yarn":
        neutral |= {"yarn_attn_factor": (1.0,), "yarn_log_multiplier": (0.0, 1.0)}
        neutral |= {"yarn_ext_factor": (1.0, -1.0)}  # -1: not set
    for key, values in neutral.items():
        if keys.number(f"rope.scaling.{key}", values[0]) not in values:
            raise UnsupportedModelError(f"GGUF rotary setting rope.scaling.{key} is not supported")
    scaled = kind not in ("", "none", "linear", "yarn") or (kind != "none" and factor != 1)
    if factors is not None:
        if scaled:
            raise UnsupportedModelError(f"{ROPE_FACTORS} with rope.scaling.type {kind!r}")
        return llama3_parameters(factors, theta)
    if not scaled:
        return {"rope_type": "default"}
    if kind == "longrope":
        raise UnsupportedModelError("GGUF with rope type 'longrope' is not supported")
    out: Config = {"rope_type": kind or "linear", "factor": factor}  # a factor alone is linear
    out["original_max_position_embeddings"] = keys.count("rope.scaling.original_context_length")
    for key in ("beta_fast", "beta_slow"):
        out[key] = keys.get(f"rope.scaling.yarn_{key}")
    return out


def llama3_parameters(factors: np.ndarray, theta: float) -> Config:
    """Recover Llama 3's scaling from the divisors [C / 2] that converters store instead of it.

    All released models share low 1, high 4 and original context 8192; the factor is the greatest
    divisor. The divisors are worked out again and must agree, else the file is refused.
    """
    half, factor, original = len(factors), float(factors.max()), 8192
    wavelength = 2 * np.pi * theta ** (np.arange(half) / half)
    smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise UnsupportedModelError(f"{ROPE_FACTORS} is not the rotary scaling of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
