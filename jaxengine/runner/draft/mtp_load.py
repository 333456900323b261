"""The weights of a checkpoint's extra layer (`runner.draft.mtp`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxengine.models.errors import ModelLoadError
from jaxengine.models.families import family_of, weight_names
from jaxengine.models.params import Leaf, layer_leaves
from jaxengine.models.spec import DecoderSpec
from jaxengine.runner.draft.mtp import mtp_leaves
from jaxengine.weights.load import DTYPES
from jaxengine.weights.naming import expected_shapes, find
from jaxengine.weights.resolve import ModelFiles
from jaxengine.weights.sources import Source, checkpoint_sources

Arrays = dict[str, NDArray[Any]]


def read_mtp(files: ModelFiles, extended: DecoderSpec, dtype: str) -> tuple[Arrays, Arrays]:
    """(the decoder layer's leaves, those of `mtp_leaves`), cast to `dtype`.

    Raises ModelLoadError naming file and tensor.
    """
    number = extended.num_layers - 1
    have, family = checkpoint_sources(files, extended), family_of(extended)
    _, names = weight_names(extended, files.kind, number)
    others = mtp_leaves(extended)
    patterns = {**names, **{name: (where,) for name, (_, where) in others.items()}}

    def read(leaves: dict[str, Leaf]) -> Arrays:
        arrays = {}
        for name, leaf in leaves.items():
            wanted = (name, leaf)
            _, sources = find(have, extended, family, wanted, patterns, number, files.path)
            arrays[name] = _joined(leaf, sources, DTYPES[dtype])
        return arrays

    layer = read(layer_leaves(extended, number))
    return layer, read({name: leaf for name, (leaf, _) in others.items()})


def _joined(leaf: Leaf, sources: tuple[Source, ...], dtype: Any) -> NDArray[Any]:
    out = np.empty(leaf.shape, np.float32 if leaf.wide else dtype)
    rows = out
    if len(sources[0].shape) < out.ndim:  # single experts' matrices into their stack
        rows = out.reshape(-1, out.shape[-1])
    at = 0
    for source, expected in zip(sources, expected_shapes(leaf, len(sources)), strict=True):
        if source.shape != expected:
            raise ModelLoadError(
                f"{source.path}: tensor {source.name} has shape {list(source.shape)} "
                f"instead of {list(expected)}"
            )
        count = source.shape[0]
        rows[at : at + count] = source.read(0, count)
        at += count
    assert math.prod(rows[:at].shape) == out.size
    return out
