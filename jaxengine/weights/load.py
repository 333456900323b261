"""Checkpoint to parameter tree: names, shapes, casts, and a bounded amount of memory."""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from jaxengine.models.families import gguf as gguf_names
from jaxengine.models.families import spec_from_config, spec_from_gguf, weight_names
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.weights import gguf, safetensors
from jaxengine.weights.errors import ModelLoadError, UnsupportedModelError
from jaxengine.weights.resolve import ModelFiles

log = logging.getLogger(__name__)

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
_CHUNK = 2**22  # elements read, dequantised and cast at a time, per thread
_AHEAD = 2**25  # elements of finished or started leaves that wait for `put`
# stored by some exporters, computed by everyone; never missed, never worth a warning
_IGNORABLE = re.compile(r"rotary_emb\.inv_freq$|masked_bias$|^rope_freqs\.weight$|_extra_state$")


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


@dataclass(frozen=True)
class Leaf:
    """A leaf of the tree: its checkpoint tensors, joined along rows, and the expected shape."""

    path: tuple[str | int, ...]
    sources: tuple[Source, ...]
    shape: tuple[int, ...]


def load_spec(files: ModelFiles) -> DecoderSpec:
    """The model as data. Raises ModelLoadError, UnsupportedModelError."""
    if files.kind == "hf":
        return spec_from_config(files.config or {})
    metadata, tensors = gguf.read_gguf(files.paths)
    factors = tensors.get(gguf_names.ROPE_FACTORS)
    rope = None if factors is None else gguf.read_rows(factors, 0, factors.shape[0])
    return spec_from_gguf(metadata, {n: t.shape for n, t in tensors.items()}, rope)


def checkpoint_dtype(files: ModelFiles) -> str:
    """float32, bfloat16 or float16 as config.json says, or else the commonest type stored;
    "quantized" for a GGUF file whose matrices are mostly blocks."""
    config = files.config or {}
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if named in DTYPES:
        return named
    short = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
    sizes: Counter[str] = Counter()
    for source in _sources(files).values():
        sizes[short.get(source.stored, "quantized")] += math.prod(source.shape)
    return sizes.most_common(1)[0][0] if sizes else "float32"


def load_params(
    files: ModelFiles,
    spec: DecoderSpec,
    dtype: str,
    put: Callable[[np.ndarray], Any],
    progress: bool = True,
) -> Params:
    """The parameter tree of models/spec.py, each leaf cast to `dtype` and passed through `put`.

    `put` is called in this thread, once per leaf, as soon as the leaf is done. Everything is
    checked before the first byte of weights is read. Raises ModelLoadError (missing tensor, wrong
    shape, truncated file) and UnsupportedModelError, naming file and tensor.
    """
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    leaves = _leaves(files, spec)
    params: Params = {"layers": [{} for _ in range(spec.num_layers)]}
    with (
        tqdm(total=len(leaves), desc="Loading weights", unit="leaf", disable=not progress) as bar,
        ThreadPoolExecutor(min(8, os.cpu_count() or 1), "weights") as pool,
    ):
        for leaf, array in _read_ahead(leaves, DTYPES[dtype], pool):
            node: Any = params
            for key in leaf.path[:-1]:
                node = node[key]
            node[leaf.path[-1]] = put(array)
            bar.update()
    return params


def _read_ahead(
    leaves: list[Leaf], dtype: Any, pool: ThreadPoolExecutor
) -> Iterator[tuple[Leaf, np.ndarray]]:
    """Leaves in order, later ones being read meanwhile, so many that memory stays bounded."""
    waiting: deque[tuple[Leaf, np.ndarray, list[Future[None]]]] = deque()
    ahead = 0
    todo = deque(leaves)
    while todo or waiting:
        while todo and (not waiting or ahead + math.prod(todo[0].shape) <= _AHEAD):
            leaf = todo.popleft()
            array = np.empty(leaf.shape, dtype)
            waiting.append((leaf, array, _start(leaf, array, pool)))
            ahead += array.size
        leaf, array, jobs = waiting.popleft()
        for job in jobs:
            job.result()
        yield leaf, array
        ahead -= array.size
        del array


def _start(leaf: Leaf, array: np.ndarray, pool: ThreadPoolExecutor) -> list[Future[None]]:
    jobs: list[Future[None]] = []
    row = 0
    for source in leaf.sources:
        total = source.shape[0]
        step = max(1, _CHUNK // math.prod(source.shape[1:]) // source.unit) * source.unit
        for start in range(0, total, step):
            stop = min(start + step, total)
            jobs.append(pool.submit(_copy, source, start, stop, array[row + start : row + stop]))
        row += total
    return jobs


def _copy(source: Source, start: int, stop: int, out: np.ndarray) -> None:
    out[...] = source.read(start, stop)


def _leaves(files: ModelFiles, spec: DecoderSpec) -> list[Leaf]:
    """All leaves with checked sources; a missing tensor or wrong shape raises, extra ones warn."""
    have = _sources(files, spec)
    top, layer = weight_names(spec, files.kind)
    wanted: list[tuple[tuple[str | int, ...], tuple[str, ...], int]] = []
    wanted += [((leaf,), names, -1) for leaf, names in top.items()]
    for i in range(spec.num_layers):
        wanted += [(("layers", i, leaf), names, i) for leaf, names in layer.items()]
    leaves: list[Leaf] = []
    used: set[str] = set()
    for path, patterns, i in wanted:
        names = [p.replace("{i}", str(i)) for p in patterns]
        for name in names:
            if name not in have:
                raise ModelLoadError(f"{files.path} lacks tensor {name}")
        sources = tuple(have[n] for n in names)
        used.update(names)
        leaf, shape = str(path[-1]), leaf_shape(spec, str(path[-1]))
        # one source: some families store q, k, v or gate, up joined already
        parts = [shape] if len(sources) == 1 else _parts(spec, leaf, shape)
        for source, expected in zip(sources, parts, strict=True):
            if source.shape != expected:
                raise ModelLoadError(
                    f"{source.path}: tensor {source.name} has shape {list(source.shape)} "
                    f"instead of {list(expected)}"
                )
        leaves.append(Leaf(path, sources, shape))
    ignorable = {"lm_head.weight", "output.weight"} if spec.tie_embeddings else set()
    extra = sorted(n for n in have if n not in used | ignorable and not _IGNORABLE.search(n))
    if extra:
        log.warning("%s: %d unknown tensors ignored, first %s", files.path, len(extra), extra[0])
    return leaves


def leaf_shape(spec: DecoderSpec, leaf: str) -> tuple[int, ...]:
    """Shape of a leaf by its name; the table at the end of models/spec.py."""
    wide, head = spec.hidden_size, spec.head_dim
    qkv, ffn = (spec.num_heads + 2 * spec.num_kv_heads) * head, spec.ffn_size
    return {
        "embed": (spec.vocab_size, wide),
        "head": (spec.vocab_size, wide),
        "final_norm": (wide,),
        "attn_norm": (wide,),
        "mlp_norm": (wide,),
        "qkv": (qkv, wide),
        "qkv_bias": (qkv,),
        "q_norm": (head,),
        "k_norm": (head,),
        "o": (wide, spec.num_heads * head),
        "o_bias": (wide,),
        "gate_up": (2 * ffn, wide),
        "gate_up_bias": (2 * ffn,),
        "down": (wide, ffn),
        "down_bias": (wide,),
    }[leaf]


def _parts(spec: DecoderSpec, leaf: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of the tensors that are joined to a leaf."""
    rows = [shape[0]]
    if leaf in ("qkv", "qkv_bias"):
        rows = [n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    if leaf in ("gate_up", "gate_up_bias"):
        rows = [spec.ffn_size, spec.ffn_size]
    return [(n, *shape[1:]) for n in rows]


def _sources(files: ModelFiles, spec: DecoderSpec | None = None) -> dict[str, Source]:
    if files.kind == "hf":
        return {
            n: Source(n, t.shape, t.path, t.dtype, partial(safetensors.read_rows, t))
            for n, t in safetensors.read_folder(files.path).items()
        }
    metadata, tensors = gguf.read_gguf(files.paths)
    swap = spec is not None and metadata.get("general.architecture") in gguf_names.PERMUTED
    out: dict[str, Source] = {}
    for name, tensor in tensors.items():
        of_heads = swap and re.search(r"\.attn_[qk]\.(weight|bias)$", name)
        head_dim = spec.head_dim if spec is not None and of_heads else 0
        read = partial(gguf.read_rows, tensor, head_dim=head_dim)
        stored = gguf.quant_name(tensor)
        out[name] = Source(name, tensor.shape, tensor.path, stored, read, head_dim or 64)
    return out


__all__ = ["UnsupportedModelError", "checkpoint_dtype", "load_params", "load_spec", "leaf_shape"]
