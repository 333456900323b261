"""A drafter's folder: config.json and draft.safetensors, and the check that it fits its target."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxengine.models.spec import DecoderSpec
from jaxengine.runner.draft.draft_head import ARCHITECTURE, DraftConfig, head_shapes
from jaxengine.weights.resolve import read_json

CONFIG, WEIGHTS = "config.json", "draft.safetensors"
_VOCAB = "vocab_ids"


@dataclass(frozen=True)
class Draft:
    """A drafter as plain arrays. `vocab_ids` [v] are the target's tokens that it can draft."""

    config: DraftConfig
    params: dict[str, NDArray[Any]]
    vocab_ids: NDArray[np.int32]


def save(folder: Path, draft: Draft, report: dict[str, Any] | None = None) -> None:
    """Write the folder. `report` (how it was trained, its acceptance) goes into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(leaf) for name, leaf in draft.params.items()}
    save_file({**tensors, _VOCAB: draft.vocab_ids.astype(np.int32)}, folder / WEIGHTS)
    text = {**dataclasses.asdict(draft.config), "training": report or {}}
    (folder / CONFIG).write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")


def load(folder: str | Path) -> Draft:
    """Read a drafter. Raises ValueError naming the file and what is wrong with it."""
    folder = Path(folder)
    config = _config(folder / CONFIG)
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    shapes = {**head_shapes(config), _VOCAB: (config.draft_vocab_size,)}
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"{path} has no tensor {name}")
        if tensors[name].shape != shape:
            found = list(tensors[name].shape)
            raise ValueError(f"{path}: tensor {name} has shape {found} instead of {list(shape)}")
    ids = tensors.pop(_VOCAB).astype(np.int32)
    if ids.size == 0 or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"{path}: {_VOCAB} are not all in the vocabulary of {config.vocab_size}")
    return Draft(config, {name: tensors[name] for name in head_shapes(config)}, ids)


def check(draft: Draft, spec: DecoderSpec, fingerprint: str) -> None:
    """Raises ValueError with one sentence when the drafter was made for another target."""
    config = draft.config
    if config.vocab_size != spec.vocab_size:
        raise ValueError(
            f"the drafter was trained for a vocabulary of {config.vocab_size} tokens, "
            f"but the model has {spec.vocab_size}"
        )
    if config.hidden_size != spec.hidden_size:
        raise ValueError(
            f"the drafter was trained for hidden states of width {config.hidden_size}, "
            f"but the model's have {spec.hidden_size}"
        )
    if config.fingerprint != fingerprint:
        raise ValueError(
            f"the drafter was trained for other weights ({config.target}, fingerprint "
            f"{config.fingerprint}) than the model's ({fingerprint}): train it again"
        )


def _config(path: Path) -> DraftConfig:
    raw = read_json(path)
    if raw.get("architecture") != ARCHITECTURE:
        raise ValueError(f"{path} is not the config of a drafter ({ARCHITECTURE})")
    known = {field.name: field for field in dataclasses.fields(DraftConfig)}
    values = {name: value for name, value in raw.items() if name in known}
    for name, field in known.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise ValueError(f"{path} has no {name}")
        kind = {"int": int, "float": (int, float), "str": str}[str(field.type)]
        if name in values and (
            not isinstance(values[name], kind) or isinstance(values[name], bool)  # type: ignore[arg-type]
        ):
            raise ValueError(f"{path}: {name} must be {field.type}, got {values[name]!r}")
    config = DraftConfig(**values)
    sizes = ("vocab_size", "hidden_size", "ffn_size", "num_layers", "draft_vocab_size")
    for name in sizes:
        if getattr(config, name) < 1:
            raise ValueError(f"{path}: {name} must be at least 1, got {getattr(config, name)}")
    return config
