"""Which weights a folder or file holds, told by a few bytes of each file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from jaxengine.weights.resolve import ModelFiles
from jaxengine.weights.safetensors import weight_files

_SAMPLES, _BYTES = 32, 4096


def fingerprint(files: ModelFiles) -> str:
    """Hex digest of the configuration and of samples spread over every weight file: enough to tell
    two fine-tunes of one model apart without reading them whole."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(files.config or {}, sort_keys=True, default=str).encode())
    for path in _weight_files(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * max(0, size - _BYTES) // max(1, _SAMPLES - 1))
                digest.update(file.read(_BYTES))
    return digest.hexdigest()


def _weight_files(files: ModelFiles) -> list[Path]:
    if files.kind == "hf":
        return weight_files(files.path)
    return sorted(files.paths)
