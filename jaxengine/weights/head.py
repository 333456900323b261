"""Whether the output head is the embeddings: the file decides, not the configuration alone.

Some tools save a head of its own beside "tied" embeddings, or leave the head of an "untied" model
out because it is the same. What the file holds is what was trained.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np

from jaxengine.models.families import weight_names
from jaxengine.models.spec import DecoderSpec
from jaxengine.weights.resolve import ModelFiles
from jaxengine.weights.safetensors import weight_files
from jaxengine.weights.sources import Source, checkpoint_sources

log = logging.getLogger(__name__)

_CHUNK = 2**21  # elements compared at a time


def settle_head(files: ModelFiles, spec: DecoderSpec) -> DecoderSpec:
    """The model with `tie_embeddings` as the file has it, and a warning where its configuration
    says another thing. Both tensors are read when both are there: up to their first difference.

    A head that a GGUF file holds is tied too when it is a copy: nothing there says which is meant.
    """
    if files.kind == "hf" and not weight_files(files.path):
        return spec  # a configuration alone
    have = checkpoint_sources(files, spec)
    embed, head, norm = _names(files.kind, spec)
    if head not in have:
        stem = head.removesuffix("weight")
        other = any(name.startswith(stem) for name in have)  # a head in another form
        whole = embed in have and norm in have  # no part of a model, such as a draft head
        if not spec.tie_embeddings and whole and not other:
            log.warning(
                "%s has no %s although tie_word_embeddings is false: the embeddings are the head",
                files.path, head,
            )  # fmt: skip
            return replace(spec, tie_embeddings=True)
        return spec
    if embed not in have or not (spec.tie_embeddings or files.kind == "gguf"):
        return spec
    tied = _equal(have[embed], have[head])
    if not tied and spec.tie_embeddings:
        log.warning(
            "%s: %s differs from the embeddings although tie_word_embeddings is true: the file's "
            "head is used", have[head].path, have[head].name,
        )  # fmt: skip
    return replace(spec, tie_embeddings=tied)


def with_embeddings(
    have: dict[str, Source], files: ModelFiles, spec: DecoderSpec
) -> dict[str, Source]:
    """The tensors, where a tied model was saved by the name of its head with that of its
    embeddings."""
    embed, head, _ = _names(files.kind, spec)
    if spec.tie_embeddings and embed not in have and head in have:
        return {**have, embed: have[head]}
    return have


def _names(kind: str, spec: DecoderSpec) -> tuple[str, str, str]:
    top, _ = weight_names(replace(spec, tie_embeddings=False), kind)
    return top["embed"][0], top["head"][0], top["final_norm"][0]


def _equal(a: Source, b: Source) -> bool:
    if a.shape != b.shape:
        return False
    rows = a.shape[0]
    step = max(1, _CHUNK // max(1, math.prod(a.shape[1:])))
    return all(
        _same(a.read(start, min(start + step, rows)), b.read(start, min(start + step, rows)))
        for start in range(0, rows, step)
    )


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        return True
    return np.array_equal(a.astype(np.float32), b.astype(np.float32))
