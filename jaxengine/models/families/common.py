"""What families share: reading config fields, rotary settings, windows, and weight-name tables.

A family is one function from a configuration to a DecoderSpec and one table from leaves of the
parameter tree to checkpoint names. Unknown settings are refused, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxengine.models.errors import UnsupportedModelError
from jaxengine.models.spec import DecoderSpec, RopeSpec
from jaxengine.models.values import integer, one_for_all, switch

Config = dict[str, Any]
# leaf of the parameter tree -> checkpoint tensors, concatenated along rows; {i} is the layer and
# {e} the expert (a name with {e} stands for those of all experts)
Names = dict[str, tuple[str, ...]]

_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", **dict.fromkeys(_TANH_GELU, "gelu")}
_KINDS = ("full_attention", "sliding_attention")
_ATTN, _MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."

TOP_NAMES: Names = {
    "embed": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}
LAYER_NAMES: Names = {
    "attn_norm": ("model.layers.{i}.input_layernorm.weight",),
    "qkv": (_ATTN + "q_proj.weight", _ATTN + "k_proj.weight", _ATTN + "v_proj.weight"),
    "qkv_bias": (_ATTN + "q_proj.bias", _ATTN + "k_proj.bias", _ATTN + "v_proj.bias"),
    "q_norm": (_ATTN + "q_norm.weight",),
    "k_norm": (_ATTN + "k_norm.weight",),
    "o": (_ATTN + "o_proj.weight",),
    "o_bias": (_ATTN + "o_proj.bias",),
    "mlp_norm": ("model.layers.{i}.post_attention_layernorm.weight",),
    "gate_up": (_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    "gate_up_bias": (_MLP + "gate_proj.bias", _MLP + "up_proj.bias"),
    "down": (_MLP + "down_proj.weight",),
    "down_bias": (_MLP + "down_proj.bias",),
}
_EXPERT, _SHARED = _MLP + "experts.{e}.", _MLP + "shared_experts."
MOE_NAMES: Names = {
    **LAYER_NAMES,
    "router": (_MLP + "gate.weight",),
    "experts_gate_up": (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
    "experts_down": (_EXPERT + "down_proj.weight",),
    "shared_gate_up": (_SHARED + "gate_proj.weight", _SHARED + "up_proj.weight"),
    "shared_down": (_SHARED + "down_proj.weight",),
}


@dataclass(frozen=True)
class Family:
    """One row of the registry. GGUF names are the same for all (see families/gguf.py).

    `limits` is one sentence for users: what of the family is refused or differs. Two things that
    the loader undoes: `rotary_pairs`, the rotary rows of latent attention pair neighbours instead
    of halves; `stacked_in_out`, stacks of experts are [E, in, out] with gate and up alternating.
    """

    name: str
    spec: Callable[[Config], DecoderSpec]
    top: Names
    layer: Names
    limits: str = ""
    rotary_pairs: bool = False
    stacked_in_out: bool = False


def need_int(config: Config, key: str) -> int:
    """A positive integer field. Raises UnsupportedModelError naming it."""
    value = config.get(key)
    number = _whole(config, key)
    if number is None or number <= 0:
        raise UnsupportedModelError(f"config field {key} must be a positive integer, not {value!r}")
    return number


def count(config: Config, key: str, default: int = 0) -> int:
    """An integer from 0 on, `default` when absent. Raises UnsupportedModelError naming it."""
    if config.get(key) is None:
        return default
    number = _whole(config, key)
    if number is None or number < 0:
        value = config[key]
        raise UnsupportedModelError(f"config field {key} must be 0 or more, not {value!r}")
    return number


def _whole(config: Config, key: str) -> int | None:
    layers = integer(config.get("num_hidden_layers"))
    return integer(one_for_all(config.get(key), layers, f"config field {key}"))


def flag(config: Config, key: str, default: bool) -> bool:
    """True or false, `default` when absent. Raises UnsupportedModelError naming it."""
    if config.get(key) is None:
        return default
    value = switch(config[key])
    if value is None:
        shown = config[key]
        raise UnsupportedModelError(f"config field {key} must be true or false, not {shown!r}")
    return value


def number(config: Config, key: str, default: float) -> float:
    """A finite number, `default` when absent or null. Raises UnsupportedModelError naming it."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedModelError(f"config field {key} must be a number, not {value!r}")
    return float(value)


def decoder_spec(
    config: Config, family: str, *, quantized: tuple[str, ...] = (), **extra: Any
) -> DecoderSpec:
    """The fields that read the same in every family; `extra` sets or replaces others.

    `quantized` names the quantisations whose checkpoints the loader can read.
    """
    method = config.get("quantization_config") or None
    kind = (method.get("quant_method") or "unknown") if isinstance(method, dict) else method
    if kind and kind not in quantized:
        raise UnsupportedModelError(f"quantized checkpoint ({kind}) is not supported")
    heads, width = need_int(config, "num_attention_heads"), need_int(config, "hidden_size")
    given = config.get("num_key_value_heads")
    kv_heads = heads if given is None else need_int(config, "num_key_value_heads")
    if heads % kv_heads:
        raise UnsupportedModelError(f"{heads} query heads cannot share {kv_heads} kv heads")
    if config.get("head_dim") is None and width % heads:
        raise UnsupportedModelError(f"hidden_size {width} is not divisible by {heads} heads")
    head_dim = width // heads if config.get("head_dim") is None else need_int(config, "head_dim")
    if head_dim % 2:
        raise UnsupportedModelError(f"odd head_dim {head_dim} has no rotary embedding")
    act = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if not isinstance(act, str) or act.lower() not in _ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act {act!r} is not supported for {family}")
    if "windows" not in extra and any(layer_kinds(config, lambda i: False)):
        raise UnsupportedModelError(f"layer_types with windows are not supported for {family}")
    fields: dict[str, Any] = dict(
        family=family,
        vocab_size=need_int(config, "vocab_size"),
        num_layers=need_int(config, "num_hidden_layers"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=need_int(config, "intermediate_size"),
        max_position=need_int(config, "max_position_embeddings"),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        activation=_ACTIVATIONS[act.lower()],
        tie_embeddings=flag(config, "tie_word_embeddings", False),
    )
    if "rope" not in extra:
        fields["rope"] = rope_spec(config)
    if extra.get("moe") is not None and fields["activation"] != "silu":
        raise UnsupportedModelError(f"hidden_act {act!r} is not supported for {family}")
    spec = DecoderSpec(**{**fields, **extra})
    rotary = spec.mla.rope_dim if spec.mla is not None else spec.rotary_dim or spec.head_dim
    for name in ("short_factor", "long_factor"):
        if spec.rope.kind == "longrope" and len(getattr(spec.rope, name)) != rotary // 2:
            raise UnsupportedModelError(f"rotary setting {name} must have {rotary // 2} numbers")
    return spec


def layer_kinds(config: Config, default: Callable[[int], bool]) -> list[bool]:
    """For each layer whether it has a window: by layer_types, or else by `default(layer)`.

    Raises UnsupportedModelError for other types of layers.
    """
    layers = need_int(config, "num_hidden_layers")
    kinds = config.get("layer_types") or [_KINDS[default(i)] for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in _KINDS for k in kinds):
        raise UnsupportedModelError(f"layer_types must name {layers} layers out of {_KINDS}")
    return [k == "sliding_attention" for k in kinds]


def window_size(config: Config, default: int | None = None) -> int | None:
    """sliding_window in tokens; None for none, which null, false, 0 and -1 say too."""
    value = config.get("sliding_window", default)
    if value is None or value is False:
        return None
    size = _whole({"sliding_window": default, **config}, "sliding_window")
    if size is None:
        raise UnsupportedModelError(f"config field sliding_window must be a number, not {value!r}")
    return size if size > 0 else None


def windows_where(
    config: Config, size: int | None, default: Callable[[int], bool]
) -> tuple[int, ...]:
    """A window of this size on the layers that layer_types names, or else on `default`'s."""
    longest = need_int(config, "max_position_embeddings")
    return windows([size if w else None for w in layer_kinds(config, default)], longest)


def windows(layer_windows: list[int | None], max_position: int) -> tuple[int, ...]:
    """[L] windows in tokens; () when none. A window past the context never takes effect: 0."""
    out = tuple(w if w is not None and 0 < w < max_position else 0 for w in layer_windows)
    return out if any(out) else ()


_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}
# The first name of longrope; names that say none; of text, the three parts of mrope are equal.
_RENAMED = {"su": "longrope", "none": "default", "mrope": "default"}
_ORIGINAL = "original_max_position_embeddings"


def rope_spec(config: Config, *, partial: bool = False) -> RopeSpec:
    """From rope_parameters (new style) or rope_theta and rope_scaling (old style).

    `partial`: the family handles partial_rotary_factor, which is refused otherwise.
    """
    params = _rope_params(config)
    kind = params.get("rope_type") or "default"
    kind = _RENAMED.get(kind, kind) if isinstance(kind, str) else kind
    if kind in ("linear", "dynamic") and params.get("factor") == 1:
        kind = "default"
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported")
    share = rotary_share(config)
    if share != 1.0 and not partial:
        raise UnsupportedModelError(f"partial_rotary_factor {share} is not supported")
    theta = params.get("rope_theta", config.get("rope_theta"))
    found: Config = {k: _number(params[k], k) for k in _ROPE_FIELDS[kind] if k in params}
    found["theta"] = 10000.0 if theta is None else _number(theta, "rope_theta")
    for key in ("theta", "factor"):
        if found.get(key) == 0:
            raise UnsupportedModelError(f"rotary setting {key} must not be 0")
    original = need_int(params, _ORIGINAL) if _ORIGINAL in params else None
    if original is None and config.get(_ORIGINAL) is not None:
        original = need_int(config, _ORIGINAL)
    if kind in ("llama3", "longrope") and original is None:
        raise UnsupportedModelError(f"rope type {kind!r} lacks original_max_position_embeddings")
    longest = need_int(config, "max_position_embeddings")
    if kind in ("yarn", "longrope"):
        found.setdefault("factor", longest / float(original or longest))
    if kind in ("linear", "llama3") and "factor" not in found:
        raise UnsupportedModelError(f"rope type {kind} lacks its factor")
    if kind == "longrope":
        found |= {key: _numbers(params, key) for key in ("short_factor", "long_factor")}
        found["context"] = longest
    return RopeSpec(
        kind=kind,
        original_max_position=0 if kind in ("default", "linear") else original or longest,
        truncate=flag(params, "truncate", True),
        **found,
    )


def _rope_params(config: Config) -> Config:
    """rope_parameters (new style) and rope_scaling (old style), without what is null.

    A file that has both means both: rope_scaling is what people add by hand, and wins.
    """
    out: Config = {}
    for name in ("rope_parameters", "rope_scaling"):
        part = config.get(name) or {}
        if not isinstance(part, dict):
            raise UnsupportedModelError(f"config field {name} must be an object, not {part!r}")
        part = {key: value for key, value in part.items() if value is not None}
        if any(isinstance(value, dict) for value in part.values()):
            raise UnsupportedModelError("rotary settings per layer type are not supported here")
        old_key = part.pop("type", None)
        out |= {"rope_type": old_key, **part} if old_key is not None else part
    return out


def rotary_share(config: Config) -> float:
    """The part of a head that is rotated, 1.0 = all."""
    share = _rope_params(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return 1.0 if share is None else _number(share, "partial_rotary_factor")


def _number(value: Any, key: str) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not math.isfinite(value) or value < 0:
        raise UnsupportedModelError(f"rotary setting {key} must be a number, not {value!r}")
    return float(value)


def _numbers(params: Config, key: str) -> tuple[float, ...]:
    values = params.get(key)
    if not isinstance(values, list) or not values:
        raise UnsupportedModelError(f"rotary setting {key} must be a list of numbers")
    return tuple(_number(v, key) for v in values)
