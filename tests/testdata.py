"""Where tests find their data: `tests/data`, whose README gives sources and licences.

A few files may not be redistributed. They are read from `../shared/realdata` where that folder is
beside the repository; elsewhere their tests are skipped by name, and counted in the summary.
"""

from __future__ import annotations

import atexit
import functools
import lzma
import os
import pathlib
import shutil
import tempfile

import pytest

DATA = pathlib.Path(__file__).parent / "data"
GOLDENS, CONFIGS = DATA / "goldens", DATA / "configs"
BESIDE = pathlib.Path(__file__).resolve().parents[2] / "shared" / "realdata"
NOT_HERE = "not redistributed"  # begins the reason of every such skip

# folder -> files that its publisher's licence keeps out of this repository
RESTRICTED = {
    "templates": (
        "gemma-2-2b-it",
        "hermes-3-llama-3.1-8b-tool_use",
        "llama-2-7b-chat",
        "llama-3.1-8b-instruct",
    ),
    "tokenizers": ("deepseek-coder", "llama-bpe", "llama-spm", "starcoder"),
}


def find(folder: str, name: str) -> pathlib.Path:
    """The file `name` of a folder of tests/data, unpacked if it is stored packed. Skips the test
    when it is one that may not be redistributed and is not beside the repository."""
    path = located(folder, name)
    if path is None:
        pytest.skip(f"{NOT_HERE}: {folder}/{name}")
    return path


def located(folder: str, name: str) -> pathlib.Path | None:
    """As `find`, but None for a file that may not be redistributed and is not here."""
    path = DATA / folder / name
    if path.exists():
        return path
    packed = path.with_name(f"{name}.xz")
    if packed.exists():
        return _unpacked(packed)
    path = BESIDE / folder / name
    if path.exists():
        return path
    assert any(part in name for part in RESTRICTED.get(folder, ())), f"no {folder}/{name}"
    return None


def template(name: str) -> pathlib.Path:
    """A chat template: `NAME.jinja`, or the recorded renderings `NAME.cases.json`."""
    return find("templates", name)


def tokenizer(name: str) -> pathlib.Path:
    """A vocabulary, such as "gpt-2", as a GGUF file without tensors."""
    return find("tokenizers", f"ggml-vocab-{name}.gguf")


def trace(name: str) -> pathlib.Path:
    """A trace of requests."""
    return find("traces", name)


def child_environment(**more: str) -> dict[str, str]:
    """The environment of a script that a test starts, which finds this module too."""
    path = [str(DATA.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


@functools.cache
def _folder() -> pathlib.Path:
    made = tempfile.mkdtemp(prefix="jaxengine-testdata-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return pathlib.Path(made)


@functools.cache
def _unpacked(packed: pathlib.Path) -> pathlib.Path:
    path = _folder() / packed.stem
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path
