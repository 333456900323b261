"""Folders that are interrupted, or hold more than a model: one sentence that names the file."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from testdata import GOLDENS

from jaxengine.models.errors import ModelLoadError
from jaxengine.weights.fingerprint import fingerprint
from jaxengine.weights.load import checkpoint_dtype, load_params, load_spec
from jaxengine.weights.resolve import resolve_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> pathlib.Path:
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / "llama" / file, tmp_path / file)
    return tmp_path


def load(folder: pathlib.Path) -> dict[str, Any]:
    files = resolve_model(str(folder))
    return load_params(files, load_spec(files), "float32", lambda x: x, progress=False)


def split(folder: pathlib.Path, *names: str) -> dict[str, str]:
    """The weights over files of these names; returns which tensor lies where."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {t: names[i % len(names)] for i, t in enumerate(sorted(tensors))}
    for name in names:
        save_file({t: tensors[t] for t, n in where.items() if n == name}, folder / name)
    return where


def test_marks_in_config_and_index(copy: pathlib.Path) -> None:
    where = split(copy, "a.safetensors", "b.safetensors")
    (copy / INDEX).write_text(json.dumps({"weight_map": where}), encoding="utf-8-sig")
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config, encoding="utf-8-sig")
    assert len(load(copy)["layers"]) == 3


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "cannot be read as JSON"),
        (b"[1]", "holds list instead of a JSON object"),
        (b"null", "holds NoneType instead"),
        (b'"x"', "holds str instead"),
        (b"\xff\xfe{\x00}\x00", "cannot be read as JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b'{"a":' * 100_000, "cannot be read as JSON"),
    ],
    ids=["empty", "list", "null", "text", "utf-16", "long", "deep"],
)
def test_json_that_is_no_object(file: str, text: bytes, reason: str, copy: pathlib.Path) -> None:
    (copy / file).write_bytes(text)
    with pytest.raises(ModelLoadError, match=rf"{file.replace('.', '[.]')} {reason}"):
        load(copy)


def test_parts_without_an_index(copy: pathlib.Path) -> None:
    parts = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    split(copy, *parts)
    assert len(load(copy)["layers"]) == 3
    for part in parts:
        data = (copy / part).read_bytes()
        (copy / part).unlink()
        with pytest.raises(ModelLoadError, match=f"lacks {part}, a part of the model"):
            load(copy)
        (copy / part).write_bytes(data)


def test_index_of_missing_shards(copy: pathlib.Path) -> None:
    where = split(copy, "a.safetensors", "b.safetensors")
    (copy / INDEX).write_text(json.dumps({"weight_map": where}))
    (copy / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"names the shard b\.safetensors, which is missing"):
        load(copy)
    (copy / "b.safetensors").symlink_to(copy / "gone")  # as an interrupted download leaves it
    with pytest.raises(ModelLoadError, match=r"names the shard b\.safetensors, which is missing"):
        load(copy)
    (copy / INDEX).unlink()
    with pytest.raises(ModelLoadError, match=r"b\.safetensors cannot be read"):
        load(copy)


def test_upper_case_suffix(copy: pathlib.Path) -> None:
    want = fingerprint(resolve_model(str(copy)))
    (copy / "model.safetensors").rename(copy / "Model.SAFETENSORS")
    assert len(load(copy)["layers"]) == 3
    assert len(fingerprint(resolve_model(str(copy)))) == len(want)


def test_other_files_beside_a_model(copy: pathlib.Path) -> None:
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    for name in ("._model.safetensors", "model.safetensors.part", "notes.txt", "adapter.bin"):
        (copy / name).write_bytes(b"x")
    (copy / "onnx").mkdir()
    assert len(load(copy)["layers"]) == 3


def test_what_is_no_weight_file(copy: pathlib.Path) -> None:
    path = copy / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 574216\n")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is a Git LFS pointer"):
        load(copy)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load(copy)


def test_dtype_in_its_other_forms(copy: pathlib.Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    for form, want in (
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "bf16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "FLOAT16"}, "float16"),
        ({"text_config": {"torch_dtype": "float16"}}, "float16"),
        ({"text_config": None, "dtype": "half"}, "float16"),
        ({"dtype": "auto"}, "float32"),  # what is stored
        ({"dtype": None}, "float32"),
    ):
        plain = {k: v for k, v in config.items() if k != "dtype"}
        (copy / "config.json").write_text(json.dumps({**plain, **form}))
        assert checkpoint_dtype(resolve_model(str(copy))) == want, form
