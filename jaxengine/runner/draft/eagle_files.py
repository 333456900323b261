"""Reads and writes published EAGLE and EAGLE-3 checkpoints: config.json and safetensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxengine.models.errors import ModelLoadError
from jaxengine.models.families import spec_from_config
from jaxengine.models.spec import DecoderSpec
from jaxengine.runner.draft.eagle_layer import EagleForm, default_taps, eagle_shapes
from jaxengine.weights.load import DTYPES
from jaxengine.weights.resolve import ModelFiles
from jaxengine.weights.sources import Source, checkpoint_sources

EAGLE3 = "LlamaForCausalLMEagle3"
TARGET = "jaxengine_target"  # in config.json, of heads that were trained here
_ARCHITECTURES = (EAGLE3, "Eagle3LlamaForCausalLM", "Eagle3Speculator", "LlamaForCausalLMEagle",
                  "EagleLlamaForCausalLM", "EagleForCausalLM", "LlamaForCausalLM")  # fmt: skip
_LAYER = "layers.0."
# Leaves and the tensors that they are made of, joined along rows.
_NAMES = {
    "fc": ("fc.weight",),
    "fc_bias": ("fc.bias",),
    "qkv": tuple(f"{_LAYER}self_attn.{x}_proj.weight" for x in "qkv"),
    "qkv_bias": tuple(f"{_LAYER}self_attn.{x}_proj.bias" for x in "qkv"),
    "o": (_LAYER + "self_attn.o_proj.weight",),
    "gate_up": (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"),
    "down": (_LAYER + "mlp.down_proj.weight",),
    "mlp_norm": (_LAYER + "post_attention_layernorm.weight",),
    "token_norm": (_LAYER + "input_layernorm.weight",),
    "state_norm": (_LAYER + "hidden_norm.weight",),
    "out_norm": ("norm.weight",),
    "embed": ("embed_tokens.weight",),
    "head": ("lm_head.weight",),
    "d2t": ("d2t",),
    "t2d": ("t2d",),
}
_UNUSED = (_LAYER + "self_attn.rotary_emb.inv_freq",)
_OF_EAGLE3 = _LAYER + "hidden_norm.weight"


@dataclass(frozen=True)
class EagleHead:
    """A head as plain arrays: `eagle_shapes`' leaves and perhaps `fc_bias`, `embed`, `head` and
    `vocab_ids`."""

    form: EagleForm
    params: dict[str, NDArray[Any]]


def read_eagle(files: ModelFiles, target: DecoderSpec, fingerprint: str, dtype: str) -> EagleHead:
    """A head for this target, matrices cast to `dtype`. Raises ModelLoadError or ValueError with
    one sentence that names what does not fit."""
    config = _flat(files.config or {})
    names = config.get("architectures") or [EAGLE3]
    if names[0] not in _ARCHITECTURES:
        raise ValueError(f"architecture {names[0]} is no EAGLE head of a Llama layer")
    mark = config.get(TARGET)
    if mark is not None and mark != fingerprint:
        raise ValueError(
            f"the head was trained for other weights ({TARGET} {mark}) than the model's "
            f"({fingerprint}): train it again"
        )
    have = {_plain(name): source for name, source in checkpoint_sources(files).items()}
    spec = _layer_spec(config, have)
    form = _form(config, spec, target, have)
    params = {
        name: _read(files, have, name, shape, dtype) for name, shape in eagle_shapes(form).items()
    }
    width, size = spec.hidden_size, form.draft_vocab_size
    if "fc.bias" in have:
        params["fc_bias"] = _read(files, have, "fc_bias", (width,), dtype)
    if "embed_tokens.weight" in have:
        params["embed"] = _read(files, have, "embed", (target.vocab_size, width), dtype)
    elif width != target.hidden_size:
        raise ValueError(f"{files.path} lacks embed_tokens.weight of its own width {width}")
    if form.is_eagle3 and "lm_head.weight" in have:
        params["head"] = _read(files, have, "head", (size, width), dtype)
    elif size != target.vocab_size or width != target.hidden_size:
        raise ValueError(f"{files.path} lacks lm_head.weight of its {size} draft tokens")
    if "d2t" in have:
        params["vocab_ids"] = _vocabulary(files, have, form, target)
    elif size != target.vocab_size:
        raise ValueError(f"{files.path} lacks d2t: which {size} tokens can be drafted")
    known = {name for part in _NAMES.values() for name in part} | set(_UNUSED)
    if extra := sorted(have.keys() - known):
        raise ValueError(f"{files.path} has tensor {extra[0]}, which no EAGLE head has")
    return EagleHead(form, params)


def write_eagle(
    folder: Path, head: EagleHead, target: str, fingerprint: str, report: dict[str, Any]
) -> None:
    """An EAGLE-3 head as it is published. `report` (how it was trained, its acceptance) goes into
    config.json."""
    form, spec = head.form, head.form.spec
    heads, groups = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    cuts = {"qkv": [heads, heads + groups], "gate_up": [spec.ffn_size]}
    tensors: dict[str, NDArray[Any]] = {}
    for leaf, array in head.params.items():
        if leaf == "vocab_ids":
            continue
        for name, part in zip(_NAMES[leaf], np.split(array, cuts.get(leaf, [])), strict=True):
            name = "midlayer." + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name
            tensors[name] = np.ascontiguousarray(part)
    ids = head.params["vocab_ids"].astype(np.int64)
    tensors["d2t"] = ids - np.arange(len(ids))
    tensors["t2d"] = np.isin(np.arange(spec.vocab_size), ids)
    config = {
        "architectures": [EAGLE3],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_position,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": form.draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(form.taps)},
        "target": target,
        TARGET: fingerprint,
        "training": report,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """One level of settings; some tools put the layer's into a dictionary of their own."""
    inner = config.get("transformer_layer_config")
    more = config.get("eagle_config")
    flat = dict(config)
    for part in (inner, more):
        if isinstance(part, dict):
            flat |= part
    flat["architectures"] = config.get("architectures")
    return flat


def _plain(name: str) -> str:
    name = name.removeprefix("model.")
    return _LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _layer_spec(config: dict[str, Any], have: dict[str, Source]) -> DecoderSpec:
    """The layer's sizes, read as a Llama's."""
    layers = config.get("num_hidden_layers", 1)
    if layers != 1:
        raise ValueError(f"num_hidden_layers must be 1, got {layers}")
    llama = config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
                      "num_hidden_layers": 1, "tie_word_embeddings": False}  # fmt: skip
    spec = spec_from_config(llama)
    return replace(spec, qkv_bias=_NAMES["qkv_bias"][0] in have, o_bias=False, mlp_bias=False)


def _form(
    config: dict[str, Any], spec: DecoderSpec, target: DecoderSpec, have: dict[str, Source]
) -> EagleForm:
    if spec.vocab_size != target.vocab_size and "d2t" not in have:
        raise ValueError(f"vocab_size is {spec.vocab_size}, but the model's is {target.vocab_size}")
    if _OF_EAGLE3 not in have:
        if spec.hidden_size != target.hidden_size:
            raise ValueError(
                f"hidden_size is {spec.hidden_size}, but the model's is {target.hidden_size}"
            )
        return EagleForm(spec, target.hidden_size, target.vocab_size)
    size = config.get("draft_vocab_size") or target.vocab_size
    return EagleForm(
        replace(spec, vocab_size=target.vocab_size),
        target.hidden_size,
        size,
        _taps(config, target.num_layers),
        bool(config.get("norm_before_residual", False)),
    )


def _taps(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """The numbers of target layers after which its states are read."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(ids) if ids else default_taps(layers)
    if any(not isinstance(i, int) or not 0 < i <= layers for i in taps) or list(taps) != sorted(
        set(taps)
    ):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids {list(taps)} are not ascending numbers from 1 to "
            f"the model's {layers} layers"
        )
    return taps


def _vocabulary(
    files: ModelFiles, have: dict[str, Source], form: EagleForm, target: DecoderSpec
) -> NDArray[np.int32]:
    """The target's ids of the draft tokens: `d2t` says how far each is from its own number."""
    size = form.draft_vocab_size
    offsets = _index(files, have, "d2t", (size,)).astype(np.int64)
    ids = np.arange(size) + offsets
    if ids.min() < 0 or ids.max() >= target.vocab_size or len(set(ids.tolist())) < size:
        raise ValueError(
            f"{files.path}: d2t does not give {size} different ids of the model's "
            f"{target.vocab_size}"
        )
    if "t2d" in have:
        drafted = _index(files, have, "t2d", (target.vocab_size,)).astype(bool)
        if drafted.sum() != size or not drafted[ids].all():
            raise ValueError(f"{files.path}: t2d and d2t name different tokens")
    return ids.astype(np.int32)


def _read(
    files: ModelFiles, have: dict[str, Source], leaf: str, shape: tuple[int, ...], dtype: str
) -> NDArray[Any]:
    """A leaf of this shape; norms stay float32."""
    parts = _NAMES[leaf]
    kind = np.float32 if leaf.endswith("norm") else DTYPES[dtype]
    tensors = [_tensor(files, have, name) for name in parts]
    rows = sum(tensor.shape[0] for tensor in tensors)
    for name, tensor in zip(parts, tensors, strict=True):
        whole = (rows, *tensor.shape[1:])
        if whole != shape:
            raise ValueError(
                f"{files.path}: tensor {name} has shape {list(tensor.shape)}, which does not make "
                f"{leaf} of shape {list(shape)}"
            )
    return np.concatenate(tensors).astype(kind)


def _tensor(files: ModelFiles, have: dict[str, Source], name: str) -> NDArray[Any]:
    if name not in have:
        raise ModelLoadError(f"{files.path} lacks tensor {name}")
    return have[name].read(0, have[name].shape[0])


def _index(
    files: ModelFiles, have: dict[str, Source], name: str, shape: tuple[int, ...]
) -> NDArray[Any]:
    """A tensor of integers or flags, which models have none of."""
    source = have[name]
    if source.shape != shape:
        raise ValueError(
            f"{files.path}: tensor {name} has shape {list(source.shape)} instead of {list(shape)}"
        )
    with safe_open(source.path, "numpy") as file:
        values: NDArray[Any] = file.get_tensor(source.name)
    if values.dtype.kind not in "iub":
        raise ValueError(f"{files.path}: tensor {name} has type {values.dtype}, not of integers")
    return values
