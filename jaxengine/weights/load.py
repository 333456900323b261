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
from typing import Any

import ml_dtypes
import numpy as np

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.models.families import family_of, spec_from_config, spec_from_gguf, weight_names
from jaxengine.models.families import gguf as gguf_names
from jaxengine.models.params import Leaf, arrange, layer_leaves, leaf_shape, top_leaves
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.progress import progress_bar
from jaxengine.weights import gguf
from jaxengine.weights.head import settle_head, with_embeddings
from jaxengine.weights.naming import expected_shapes, find
from jaxengine.weights.resolve import ModelFiles
from jaxengine.weights.sources import Source, checkpoint_sources

log = logging.getLogger(__name__)

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_CHUNK = 2**22  # elements read, dequantised and cast at a time, per thread
_AHEAD = 2**25  # elements of finished or started leaves that wait for `put`
# stored by some exporters and computed by everyone, or parts of a larger model that are not text;
# never missed, never worth a warning
_IGNORABLE = re.compile(
    r"rotary_emb\.inv_freq$|masked_bias$|^rope_freqs\.weight$|_extra_state$"
    r"|^(model\.)?(vision_tower|multi_modal_projector)\."
)


@dataclass(frozen=True)
class _Load:
    """A leaf to load: its place in the tree, its checkpoint tensors, joined along rows."""

    path: tuple[str | int, ...]
    sources: tuple[Source, ...]
    leaf: Leaf

    @property
    def size(self) -> int:
        return math.prod(self.leaf.shape)


def load_spec(files: ModelFiles) -> DecoderSpec:
    """The model as data: its configuration, and whether its head is the embeddings by what the
    files hold. Raises ModelLoadError, UnsupportedModelError."""
    if files.kind == "hf":
        return settle_head(files, spec_from_config(files.config or {}))
    metadata, tensors = gguf.read_gguf(files.paths)
    factors = tensors.get(gguf_names.ROPE_FACTORS)
    rope = None if factors is None else gguf.read_rows(factors, 0, factors.shape[0])
    spec = spec_from_gguf(metadata, {n: t.shape for n, t in tensors.items()}, rope)
    return settle_head(files, spec)


def checkpoint_dtype(files: ModelFiles) -> str:
    """float32, bfloat16 or float16 as config.json says, or else the commonest type stored;
    "quantized" for a GGUF file whose matrices are mostly blocks."""
    config = files.config or {}
    inner = config.get("text_config") or {}
    for name in (of.get(key) for of in (config, inner) for key in ("dtype", "torch_dtype")):
        named = str(name or "").removeprefix("torch.").lower()
        named = _SHORT.get(named, named)
        if named in DTYPES:
            return named
    short = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
    sizes: Counter[str] = Counter()
    for source in checkpoint_sources(files).values():
        sizes[short.get(source.stored, "quantized")] += math.prod(source.shape)
    return sizes.most_common(1)[0][0] if sizes else "float32"


def load_params(
    files: ModelFiles,
    spec: DecoderSpec,
    dtype: str,
    put: Callable[[np.ndarray], Any],
    progress: bool = True,
    *,
    place: Callable[[tuple[str | int, ...], np.ndarray], Any] | None = None,
    tensor_size: int = 1,
    expert_parallel: bool = False,
) -> Params:
    """The parameter tree of models/params.py, each leaf cast to `dtype` and passed through `put`.

    `put` is called in this thread, once per leaf, as soon as the leaf is done; `place`, when
    given, is called instead and gets the leaf's path too. Leaves are laid out for `tensor_size`
    shards (`params.arrange`). Everything is checked before the first byte of weights is read.
    Raises ModelLoadError (missing tensor, wrong shape, truncated file) and UnsupportedModelError,
    naming file and tensor.
    """
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    loads = _loads(files, spec)
    params: Params = {"layers": [{} for _ in range(spec.num_layers)]}
    with (
        progress_bar(
            "Loading weights", len(loads), "tensor", why=f"from {files.path.name}", show=progress
        ) as bar,
        ThreadPoolExecutor(min(8, os.cpu_count() or 1), "weights") as pool,
    ):
        for load, array in _read_ahead(loads, DTYPES[dtype], pool):
            node: Any = params
            for key in load.path[:-1]:
                node = node[key]
            name = str(load.path[-1])
            array = arrange(name, array, spec, tensor_size, expert_parallel=expert_parallel)
            node[name] = put(array) if place is None else place(load.path, array)
            bar.update()
    gguf.forget_headers()
    return params


def _read_ahead(
    loads: list[_Load], dtype: Any, pool: ThreadPoolExecutor
) -> Iterator[tuple[_Load, np.ndarray]]:
    """Leaves in order, later ones being read meanwhile, so many that memory stays bounded."""
    waiting: deque[tuple[_Load, np.ndarray, list[Future[None]]]] = deque()
    ahead = 0
    todo = deque(loads)
    while todo or waiting:
        while todo and (not waiting or ahead + todo[0].size <= _AHEAD):
            load = todo.popleft()
            array = np.empty(load.leaf.shape, np.float32 if load.leaf.wide else dtype)
            waiting.append((load, array, _start(load, array, pool)))
            ahead += array.size
        load, array, jobs = waiting.popleft()
        for job in jobs:
            job.result()
        yield load, array
        ahead -= array.size
        del array


def _start(load: _Load, array: np.ndarray, pool: ThreadPoolExecutor) -> list[Future[None]]:
    jobs: list[Future[None]] = []
    row = 0
    if len(load.sources[0].shape) < array.ndim:  # single experts' matrices into their stack
        array = array.reshape(-1, array.shape[-1])
    for source in load.sources:
        total = source.shape[0]
        step = max(1, _CHUNK // math.prod(source.shape[1:]) // source.unit) * source.unit
        for start in range(0, total, step):
            stop = min(start + step, total)
            jobs.append(pool.submit(_copy, source, start, stop, array[row + start : row + stop]))
        row += total
    return jobs


def _copy(source: Source, start: int, stop: int, out: np.ndarray) -> None:
    out[...] = source.read(start, stop)


def _loads(files: ModelFiles, spec: DecoderSpec) -> list[_Load]:
    """All leaves with checked sources; a missing tensor or wrong shape raises, extra ones warn."""
    have = with_embeddings(checkpoint_sources(files, spec), files, spec)
    family = family_of(spec)
    loads: list[_Load] = []
    used: set[str] = set()
    for i in range(-1, spec.num_layers):
        top, layer = weight_names(spec, files.kind, max(i, 0))
        names = top if i < 0 else layer
        leaves = top_leaves(spec) if i < 0 else layer_leaves(spec, i)
        for name in names:
            leaf = leaves[name]
            found, sources = find(have, spec, family, (name, leaf), names, i, files.path)
            used.update(found)
            for source, expected in zip(sources, expected_shapes(leaf, len(sources)), strict=True):
                if source.shape != expected:
                    raise ModelLoadError(
                        f"{source.path}: tensor {source.name} has shape {list(source.shape)} "
                        f"instead of {list(expected)}"
                    )
                if source.stored == "U8":
                    raise UnsupportedModelError(
                        f"{source.path}: tensor {source.name} has type U8, which is not supported"
                    )
            loads.append(_Load((name,) if i < 0 else ("layers", i, name), sources, leaf))
    _warn_of_others(files, spec, have.keys() - used)
    return loads


def _warn_of_others(files: ModelFiles, spec: DecoderSpec, names: set[str]) -> None:
    ignorable = {"lm_head.weight", "output.weight"} if spec.tie_embeddings else set()
    extra = sorted(n for n in names - ignorable if not _ignorable(spec, n))
    if extra:
        log.warning("%s: %d unknown tensors ignored, first %s", files.path, len(extra), extra[0])


def _ignorable(spec: DecoderSpec, name: str) -> bool:
    """Layers past the last predict several tokens (DeepSeek-V3): not read."""
    past = re.match(r"model\.layers\.(\d+)\.", name)
    return bool(_IGNORABLE.search(name)) or (past is not None and int(past[1]) >= spec.num_layers)


__all__ = ["UnsupportedModelError", "checkpoint_dtype", "load_params", "load_spec", "leaf_shape"]
