"""Which checkpoint tensors make up a leaf, in any published naming of fused parts and experts.

A family names its own form first; the others are tried when that is not there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.models.families.common import Family, Names
from jaxengine.models.params import Leaf
from jaxengine.models.spec import DecoderSpec
from jaxengine.weights.mxfp4 import BLOCK, dequantise
from jaxengine.weights.sources import Source

_L = "model.layers.{i}."
_MOES = (_L + "mlp.", _L + "block_sparse_moe.")
_OTHERS: dict[str, list[tuple[str, ...]]] = {
    "qkv": [(_L + "self_attn.qkv_proj.weight",)],
    "qkv_bias": [(_L + "self_attn.qkv_proj.bias",)],
    "gate_up": [(_L + "mlp.gate_up_proj.weight",)],
    "router": [(m + r,) for m in _MOES for r in ("gate.weight", "router.weight")],
    "experts_gate_up": [
        *((f"{m}experts.{{e}}.{g}.weight", f"{m}experts.{{e}}.{u}.weight")
          for m in _MOES for g, u in (("gate_proj", "up_proj"), ("w1", "w3"))),
        *((m + "experts." + n,) for m in _MOES for n in ("gate_up_proj", "gate_up_proj.weight")),
    ],
    "experts_down": [
        *((f"{m}experts.{{e}}.{d}.weight",) for m in _MOES for d in ("down_proj", "w2")),
        *((m + "experts." + n,) for m in _MOES for n in ("down_proj", "down_proj.weight")),
    ],
}  # fmt: skip


def find(
    have: dict[str, Source],
    spec: DecoderSpec,
    family: Family,
    leaf: tuple[str, Leaf],
    names: Names,
    layer: int,
    where: object,
) -> tuple[list[str], tuple[Source, ...]]:
    """Names used, and what to join along rows to get the leaf.

    Sources of a stack of experts [E, out, in] are either one (axis 0 counts experts), or all
    experts' matrices. Raises ModelLoadError (`where` is the checkpoint) for a missing tensor.
    """
    name, shape = leaf
    first = _expand(spec, names[name], layer)
    forms = [first, *(_expand(spec, other, layer) for other in _OTHERS.get(name, []))]
    for form in forms:
        if all(n in have for n in form):
            sources = tuple(have[n] for n in form)
            return form, tuple(_prepared(spec, family, name, shape, s) for s in sources)
        packed = [f"{form[0]}_blocks", f"{form[0]}_scales"]
        if len(form) == 1 and shape.experts and all(n in have for n in packed):
            source = _mxfp4(have[packed[0]], have[packed[1]])
            return packed, (_alternating(source) if _pairs(family, name) else source,)
    missing = next(n for n in first if n not in have)
    raise ModelLoadError(f"{where} lacks tensor {missing}")


def _expand(spec: DecoderSpec, patterns: tuple[str, ...], layer: int) -> list[str]:
    names = [p.replace("{i}", str(layer)) for p in patterns]
    if spec.moe is None or "{e}" not in names[0]:
        return names
    return [n.replace("{e}", str(e)) for e in range(spec.moe.num_experts) for n in names]


def expected_shapes(leaf: Leaf, count: int) -> list[tuple[int, ...]]:
    """Shapes of the `count` tensors that are joined to a leaf."""
    if count == 1:
        return [leaf.shape]
    axis = leaf.split or 0
    if not leaf.experts:
        return [(units * rows, *leaf.shape[1:]) for units, rows in leaf.parts]
    experts, rows, width = leaf.shape
    each = [units for units, _ in leaf.parts] if axis == 1 else [rows]
    return [(n, width) for _ in range(experts) for n in each]


def _pairs(family: Family, name: str) -> bool:
    return family.stacked_in_out and name in ("experts_gate_up", "experts_gate_up_bias")


def _prepared(spec: DecoderSpec, family: Family, name: str, leaf: Leaf, source: Source) -> Source:
    if leaf.experts and len(source.shape) == 3:
        experts, out, width = leaf.shape
        turned = source.shape == (experts, width, out)
        if turned and (family.stacked_in_out or source.shape != leaf.shape):
            source = _transposed(source)
        source = replace(source, unit=1)
    if _pairs(family, name):
        return _alternating(source)
    if family.rotary_pairs and spec.mla is not None and name in ("q", "q_b", "kv_a"):
        head = spec.mla.width if name == "kv_a" else spec.head_dim
        return _halves(source, head, spec.mla.rope_dim)
    return source


def _transposed(source: Source) -> Source:
    experts, width, out = source.shape
    return replace(
        source,
        shape=(experts, out, width),
        read=lambda start, stop: source.read(start, stop).swapaxes(1, 2),
    )


def _alternating(source: Source) -> Source:
    """Rows gate, up, gate, up, ... of axis 1 as all of gate, then all of up."""

    def read(start: int, stop: int) -> np.ndarray:
        rows = source.read(start, stop)
        return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)

    return replace(source, read=read, unit=1)


def _halves(source: Source, head: int, rotary: int) -> Source:
    """The last `rotary` rows of every head, neighbours paired, reordered to two halves."""
    plain = head - rotary
    order = [*range(plain), *range(plain, head, 2), *range(plain + 1, head, 2)]

    def read(start: int, stop: int) -> np.ndarray:
        rows = source.read(start, stop)
        return rows.reshape(-1, head, *rows.shape[1:])[:, order].reshape(rows.shape)

    return replace(source, read=read, unit=head)


def _mxfp4(blocks: Source, scales: Source) -> Source:
    """A stack [E, out, in] from bytes [E, out, in / 32, 16] and exponents [E, out, in / 32]."""
    if blocks.stored != "U8" or scales.stored != "U8" or len(blocks.shape) != 4:
        raise UnsupportedModelError(f"{blocks.path}: tensor {blocks.name} is not MXFP4")
    if blocks.shape[:3] != scales.shape or blocks.shape[3] != BLOCK // 2:
        raise ModelLoadError(
            f"{blocks.path}: tensor {blocks.name} of shape {list(blocks.shape)} does not fit "
            f"scales of shape {list(scales.shape)}"
        )
    experts, out, groups = scales.shape

    def read(start: int, stop: int) -> np.ndarray:
        return dequantise(blocks.read(start, stop), scales.read(start, stop))

    return replace(blocks, shape=(experts, out, groups * BLOCK), read=read, stored="MXFP4", unit=1)
