"""GGUF files: metadata, tensor index, and dequantised rows.

Own header reader: `gguf.GGUFReader` keeps several NumPy objects for every element of every array,
which takes seconds for a vocabulary of 50k tokens and its merges; a plain walk over the bytes takes
well under 0.1 s. The block formats themselves are left to `gguf.dequantize`.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.models.values import integer

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_PLAIN: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"),
    1: np.dtype("<f2"),
    28: np.dtype("<f8"),
}  # F32, F16, F64


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: `shape` in NumPy order (outermost first), where its bytes lie in which file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    path: Path
    offset: int
    nbytes: int


class _Cursor:
    """A position in the mapped header; reads past the end are a truncated file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def scalar(self, s: struct.Struct) -> Any:
        try:
            (value,) = s.unpack_from(self.data, self.at)
        except struct.error as e:
            raise ModelLoadError(f"{self.path} is truncated in its header") from e
        self.at += s.size
        return value

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise ModelLoadError(f"{self.path} is truncated in its header")
        self.at += n
        return self.data[self.at - n : self.at]

    def text(self) -> str:
        return self.take(self.scalar(_U64)).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(struct.Struct("<" + _SCALARS[kind]))
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ModelLoadError(f"{self.path} has a metadata value of unknown type {kind}")
        inner, count = self.scalar(_U32), self.scalar(_U64)
        if inner in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[inner])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if count > len(self.data) - self.at:  # an element takes a byte at least
            raise ModelLoadError(f"{self.path} is truncated in its header")
        if inner == _STRING:
            return self.texts(count)
        return [self.value(inner) for _ in range(count)]

    def texts(self, count: int) -> list[str]:
        """An array of strings (a vocabulary is long: no call for each of its parts)."""
        out: list[str] = []
        data, at, length = self.data, self.at, _U64.unpack_from
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                out.append(data[start:at].decode("utf-8", "replace"))
        except (struct.error, OverflowError) as e:
            raise ModelLoadError(f"{self.path} is truncated in its header") from e
        if at > len(data):
            raise ModelLoadError(f"{self.path} is truncated in its header")
        self.at = at
        return out


def _open(path: Path) -> tuple[_Cursor, int, int]:
    try:
        with path.open("rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
        raise ModelLoadError(f"{path} cannot be read as GGUF: {e}") from e
    cursor = _Cursor(path, data)
    if cursor.take(4) != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF file")
    version = cursor.scalar(_U32)
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(f"{path} is a big-endian GGUF file, which is not supported")
    if version not in (2, 3):
        raise UnsupportedModelError(f"{path} has GGUF version {version}; versions 2 and 3 are read")
    return cursor, cursor.scalar(_U64), cursor.scalar(_U64)


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar(_U32))
    return metadata


def gguf_metadata(path: Path) -> dict[str, Any]:
    """All key/value pairs of a GGUF file, arrays as lists. Raises ModelLoadError."""
    return dict(_read_header(path).metadata)


def forget_headers() -> None:
    """A header is read once, though the tokenizer, the spec and the loader ask for it; when all
    have it, its lists of tokens need not stay."""
    _header.cache_clear()


class _Header(NamedTuple):
    metadata: dict[str, Any]
    num_tensors: int
    end: int  # where the tensors' index begins


def _read_header(path: Path) -> _Header:
    try:
        found = path.stat()
    except OSError as e:
        raise ModelLoadError(f"{path} cannot be read as GGUF: {e}") from e
    return _header(path, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=16)  # files of one model
def _header(path: Path, size: int, changed: int) -> _Header:
    cursor, num_tensors, num_keys = _open(path)
    return _Header(_metadata(cursor, num_keys), num_tensors, cursor.at)


def read_gguf(paths: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata (of the first file) and tensor index of a model in one or more GGUF files.

    Raises ModelLoadError for a truncated file or a tensor named twice, UnsupportedModelError for a
    quantisation that `gguf` does not know.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for i, path in enumerate(paths):
        part, num_tensors, end = _read_header(path)
        metadata = metadata or dict(part)
        splits = integer(part.get("split.count")) or len(paths)
        if splits != len(paths) or part.get("split.no", i) != i:
            raise ModelLoadError(
                f"{path} is one of {splits} parts: name the files NAME-00001-of-..."
            )
        cursor = _open(path)[0]
        cursor.at = end
        for tensor in _index(cursor, num_tensors, integer(part.get("general.alignment")) or 32):
            if tensor.name in tensors:
                raise ModelLoadError(f"{path} holds tensor {tensor.name} a second time")
            tensors[tensor.name] = tensor
    return metadata, tensors


def _index(cursor: _Cursor, count: int, alignment: int) -> list[GGUFTensor]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.3 s, not for tokenizers

    found: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.text()
        dims = [cursor.scalar(_U64) for _ in range(cursor.scalar(_U32))]
        found.append((name, tuple(reversed(dims)), cursor.scalar(_U32), cursor.scalar(_U64)))
    start = -(-cursor.at // alignment) * alignment
    tensors: list[GGUFTensor] = []
    for name, shape, type_id, offset in found:
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        except (ValueError, KeyError) as e:
            raise UnsupportedModelError(
                f"{cursor.path}: tensor {name} has unknown quantisation type {type_id}"
            ) from e
        if not shape or (len(shape) == 1 and block > 1):
            raise UnsupportedModelError(f"{cursor.path}: {name} is a scalar or quantised vector")
        if shape[-1] % block:
            raise ModelLoadError(f"{cursor.path}: rows of {name} are no whole blocks of {block}")
        nbytes = math.prod(shape) // block * size
        if start + offset + nbytes > len(cursor.data):
            raise ModelLoadError(f"{cursor.path} is truncated: tensor {name} is not all there")
        tensors.append(GGUFTensor(name, shape, type_id, cursor.path, start + offset, nbytes))
    return tensors


def quant_name(tensor: GGUFTensor) -> str:
    from gguf.constants import GGMLQuantizationType

    return str(GGMLQuantizationType(tensor.type_id).name)


def read_rows(tensor: GGUFTensor, start: int, stop: int, head_dim: int = 0) -> np.ndarray:
    """float32 [stop - start, ...]: rows of the outermost axis, dequantised.

    `head_dim` > 0 undoes the row order that converters give q and k of "llama" (the two halves of
    each head interleaved, for rotary in pairs; the engine rotates halves, as Hugging Face stores
    them); start and stop must then lie between heads. It is done on the packed rows.
    Raises UnsupportedModelError for a quantisation that has no dequantiser.
    """
    row_bytes = tensor.nbytes // max(1, tensor.shape[0])
    count = (stop - start) * row_bytes
    raw: np.ndarray = np.fromfile(
        tensor.path, np.uint8, count, offset=tensor.offset + start * row_bytes
    )
    if raw.size != count:
        raise ModelLoadError(f"{tensor.path} is truncated: tensor {tensor.name} is not all there")
    raw = raw.reshape(stop - start, row_bytes)
    if head_dim:
        raw = raw.reshape(-1, head_dim // 2, 2, row_bytes).swapaxes(1, 2).reshape(-1, row_bytes)
    return _dequantise(tensor, raw).reshape(stop - start, *tensor.shape[1:])


def _dequantise(tensor: GGUFTensor, raw: np.ndarray) -> np.ndarray:
    """Flat float32 of raw bytes [rows, row_bytes]."""
    if tensor.type_id in _PLAIN:
        plain: np.ndarray = raw.reshape(-1).view(_PLAIN[tensor.type_id])
        return plain.astype(np.float32, copy=False)
    import gguf

    # The dequantisers work on 16 rows at a time; joining short rows makes that far fewer calls
    # (3x faster at 576 columns), while rows of about 16k elements still fit the cache.
    join = 1
    while join < 32 and raw.shape[0] % (join * 2) == 0 and raw.shape[1] * join < 8192:
        join *= 2
    kind = gguf.GGMLQuantizationType(tensor.type_id)
    try:
        return np.asarray(gguf.dequantize(raw.reshape(raw.shape[0] // join, -1), kind)).reshape(-1)
    except NotImplementedError as e:
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {tensor.name} has unreadable quantisation {kind.name}"
        ) from e
