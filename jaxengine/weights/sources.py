"""The tensors of a checkpoint of either format, under one set of names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jaxengine.models.errors import ModelLoadError
from jaxengine.models.families import gguf as gguf_names
from jaxengine.models.spec import DecoderSpec
from jaxengine.weights import gguf, safetensors
from jaxengine.weights.resolve import ModelFiles


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor of either format: read(start, stop) gives rows of the outermost axis.

    start and stop are multiples of `unit` (or the end), so that heads stay whole (gguf.read_rows).
    """

    name: str
    shape: tuple[int, ...]
    path: Path
    stored: str
    read: Callable[[int, int], np.ndarray]
    unit: int = 64


def checkpoint_sources(files: ModelFiles, spec: DecoderSpec | None = None) -> dict[str, Source]:
    """All tensors by name. Text models inside of larger ones lose their prefix."""
    if files.kind == "hf":
        out: dict[str, Source] = {}
        for stored_name, t in safetensors.read_folder(files.path).items():
            name = plain_name(stored_name)
            if name in out:
                raise ModelLoadError(f"{t.path} holds tensor {name} under two names")
            read = partial(safetensors.read_rows, t, packed=t.dtype == "U8")
            out[name] = Source(stored_name, t.shape, t.path, t.dtype, read)
        return out
    metadata, tensors = gguf.read_gguf(files.paths)
    swap = spec is not None and gguf_names.architecture(metadata) in gguf_names.PERMUTED
    out = {}
    for name, tensor in tensors.items():
        of_heads = swap and re.search(r"\.attn_[qk]\.(weight|bias)$", name)
        head_dim = spec.head_dim if spec is not None and of_heads else 0
        read_gguf = partial(gguf.read_rows, tensor, head_dim=head_dim)
        stored = gguf.quant_name(tensor)
        out[name] = Source(name, tensor.shape, tensor.path, stored, read_gguf, head_dim or 64)
    return out


def plain_name(name: str) -> str:
    """The name that the text model alone would give the tensor."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")
