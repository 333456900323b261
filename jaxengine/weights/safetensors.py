"""Safetensors checkpoints: the index of a folder, and rows of a tensor.

Read with plain file reads, not through the memory map of `safetensors.safe_open`: mapped pages of a
whole shard count as this process's memory, on top of the copy that is kept.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.weights.resolve import read_json

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
INDEX = "model.safetensors.index.json"
_PART = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.safetensors$", re.I)
_POINTER = b"version https://git-lfs"  # what Git leaves where a large file was not fetched


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: where its bytes lie. `dtype` is safetensors' name (F32, BF16, ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Index of all tensors of a checkpoint folder (one file, or the shards of its index).

    Raises ModelLoadError: no safetensors (perhaps only .bin), a shard that is not there, a
    truncated file, or a tensor that the index promises and its shard lacks.
    """
    index = folder / INDEX
    if index.is_file():
        return _read_indexed(index)
    files = weight_files(folder)
    if len(files) > 1 and (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]  # others are copies or adapters
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ModelLoadError(
                f"{folder} has only pickled weights (.bin): convert them to .safetensors"
            )
        raise ModelLoadError(f"{folder} has no .safetensors file")
    _check_parts(files)
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise ModelLoadError(f"{path} holds tensor {name} a second time")
            tensors[name] = tensor
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The folder's .safetensors files; the case of the suffix does not matter."""
    files = (p for p in folder.iterdir() if p.suffix.lower() == ".safetensors")
    return sorted(p for p in files if not p.name.startswith("."))


def _check_parts(files: list[Path]) -> None:
    """Files named NAME-00001-of-00003 without an index: all of them must be there."""
    found = {(m["stem"], m["count"], m["no"]) for f in files if (m := _PART.match(f.name))}
    for stem, count in sorted({(stem, count) for stem, count, _ in found}):
        for i in range(1, int(count) + 1):
            if (stem, count, f"{i:05d}") not in found:
                name = f"{stem}-{i:05d}-of-{count}.safetensors"
                raise ModelLoadError(f"{files[0].parent} lacks {name}, a part of the model")


def _read_indexed(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelLoadError(f"{index} has no weight_map")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(weight_map.values())):
        path = index.parent / file
        if Path(file).name != file:
            raise ModelLoadError(f"{index} names a shard outside its folder: {file}")
        if not path.is_file():
            raise ModelLoadError(f"{index} names the shard {file}, which is missing")
        shards[file] = read_header(path)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise ModelLoadError(f"{index} promises tensor {name} in {file}, which lacks it")
    return {name: shards[file][name] for name, file in weight_map.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file. Raises ModelLoadError for a truncated or malformed file."""
    size, text = _header(path)
    length = len(text)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as e:  # also text that is not UTF-8
        raise ModelLoadError(f"{path} has a damaged header: {e}") from e
    tensors: dict[str, StoredTensor] = {}
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path} has a damaged header: not an object")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as e:
            raise ModelLoadError(f"{path} has a damaged header at tensor {name}") from e
        if end > size - 8 - length:
            raise ModelLoadError(f"{path} is truncated: tensor {name} is not all there")
        if dtype in _DTYPES and end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
            raise ModelLoadError(f"{path} has a damaged header: size of tensor {name}")
        tensors[name] = StoredTensor(name, shape, dtype, path, 8 + length + begin)
    return tensors


def _header(path: Path) -> tuple[int, bytes]:
    """The file's size, and the text that describes its tensors."""
    try:
        with path.open("rb") as f:
            size, first = path.stat().st_size, f.read(8)
            length = int.from_bytes(first, "little")
            if size >= 8 and length <= min(size - 8, _MAX_HEADER):
                return size, f.read(length)
            if (first + f.read(len(_POINTER))).startswith(_POINTER):
                raise ModelLoadError(f"{path} is a Git LFS pointer: fetch the file itself")
    except OSError as e:
        raise ModelLoadError(f"{path} cannot be read: {e}") from e
    raise ModelLoadError(f"{path} is truncated or no safetensors file")


def read_rows(tensor: StoredTensor, start: int, stop: int, *, packed: bool = False) -> np.ndarray:
    """[stop - start, ...] rows of the outermost axis, in the stored type.

    Raises UnsupportedModelError for a type that is no plain float (`packed`: no bytes),
    ModelLoadError when cut short.
    """
    known = {"U8": np.uint8} if packed else _DTYPES
    if tensor.dtype not in known:
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {tensor.name} has type {tensor.dtype}, which is not supported"
        )
    dtype = np.dtype(known[tensor.dtype])
    row = math.prod(tensor.shape[1:])
    count = (stop - start) * row
    offset = tensor.offset + start * row * dtype.itemsize
    data = np.fromfile(tensor.path, np.uint8, count * dtype.itemsize, offset=offset)
    if data.size != count * dtype.itemsize:
        raise ModelLoadError(f"{tensor.path} is truncated: tensor {tensor.name} is not all there")
    rows: np.ndarray = data.view(dtype).reshape(stop - start, *tensor.shape[1:])
    return rows
