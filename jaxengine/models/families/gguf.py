"""GGUF metadata as the configuration that families read, and GGUF tensor names.

Only keys differ between the two formats, so a family needs no code of its own for GGUF.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxengine.models.families.common import Config, Names
from jaxengine.weights.errors import UnsupportedModelError

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


def config_from_gguf(
    metadata: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    rope_factors: np.ndarray | None = None,
) -> Config:
    """The config.json that this file's model would have.

    `shapes` are all tensors (biases and tied embeddings show only there); `rope_factors` is the
    tensor rope_freqs.weight, [C / 2], which holds Llama 3's rotary scaling.
    """
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(f"GGUF architecture {arch!r} is not supported")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    if get("expert_count", 0):
        raise UnsupportedModelError(f"GGUF architecture {arch} with experts is not supported")
    heads, width = get("attention.head_count"), get("embedding_length")
    if isinstance(heads, list) or isinstance(get("attention.head_count_kv"), list):
        raise UnsupportedModelError("GGUF with head counts that differ by layer is not supported")
    if not heads or not width:
        raise UnsupportedModelError(f"GGUF lacks {arch}.attention.head_count or .embedding_length")
    head_dim = get("attention.key_length", width // heads)
    if get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("GGUF with unequal key and value widths is not supported")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("GGUF with rotary on a part of the head is not supported")
    window = get("attention.sliding_window") or None
    if window is not None and arch != "llama":
        raise UnsupportedModelError(f"GGUF architecture {arch} with a sliding window")
    theta = float(get("rope.freq_base", 10000.0))
    rope = _rope_parameters(get)
    if rope_factors is not None:
        rope = llama3_parameters(rope_factors, theta)
    name = ARCHITECTURES[arch]
    return {
        "architectures": ["MistralForCausalLM" if window else name],
        "sliding_window": window,
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "hidden_size": width,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": {"rope_theta": theta, **rope},
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "attention_out_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }


def _rope_parameters(get: Any) -> Config:
    kind = get("rope.scaling.type", "none")
    if kind == "none" and not get("rope.scale_linear"):
        return {"rope_type": "default"}
    if kind == "longrope":
        raise UnsupportedModelError("GGUF with rope type 'longrope' is not supported")
    out: Config = {"rope_type": "linear" if kind == "none" else kind}
    out["factor"] = get("rope.scaling.factor", get("rope.scale_linear"))
    out["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    for key in ("beta_fast", "beta_slow"):
        out[key] = get(f"rope.scaling.yarn_{key}")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if get(f"rope.scaling.{key}") not in (None, 1.0):
            raise UnsupportedModelError(f"GGUF rotary setting rope.scaling.{key} is not supported")
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
