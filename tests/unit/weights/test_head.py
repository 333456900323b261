"""Configuration and file disagree on a tied head: what the file holds decides (F30)."""

from __future__ import annotations

import json
import logging
import pathlib
import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from testdata import GOLDENS

from jaxengine.models.errors import ModelLoadError
from jaxengine.weights.load import load_params, load_spec
from jaxengine.weights.resolve import resolve_model

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# A family each, some of them tied as they are. In gpt-oss and deepseek experts are large.
FAMILIES = sorted(p.parent.name for p in GOLDENS.glob("*/config.json"))


def load(folder: pathlib.Path) -> dict[str, Any]:
    files = resolve_model(str(folder))
    return load_params(files, load_spec(files), "float32", lambda x: x, progress=False)


def copy(
    name: str, folder: pathlib.Path, tied: bool | None, **tensors: np.ndarray | None
) -> dict[str, np.ndarray]:
    """A golden with another tie_word_embeddings (None: not there) and other tensors (None: not
    there). Returns all tensors."""
    config = json.loads((GOLDENS / name / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    if tied is not None:
        config["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    have = load_file(GOLDENS / name / "model.safetensors")
    for key, value in tensors.items():
        have.pop(key, None)
        if value is not None:
            have[key] = value
    save_file(have, folder / "model.safetensors")
    return have


def embeddings(name: str) -> np.ndarray:
    return load_file(GOLDENS / name / "model.safetensors")[EMBED]


@pytest.mark.parametrize("name", FAMILIES)
def test_f30_tied_but_another_head(
    name: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = embeddings(name)[::-1].copy()
    copy(name, tmp_path, True, **{HEAD: head})
    with caplog.at_level(logging.WARNING):
        params = load(tmp_path)
    np.testing.assert_array_equal(params["head"], head)
    np.testing.assert_array_equal(params["embed"], head[::-1])
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path / 'model.safetensors'}: {HEAD} differs from the embeddings although "
        "tie_word_embeddings is true: the file's head is used"
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_f30_untied_without_a_head(
    name: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy(name, tmp_path, False, **{HEAD: None})
    with caplog.at_level(logging.WARNING):
        params = load(tmp_path)
    assert "head" not in params
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path} has no {HEAD} although tie_word_embeddings is false: the embeddings are "
        "the head"
    ]


@pytest.mark.parametrize("last", [0, 319])
def test_one_other_number_is_another_head(last: int, tmp_path: pathlib.Path) -> None:
    head = embeddings("llama").copy()
    head[last, -1] += 1
    copy("llama", tmp_path, True, **{HEAD: head})
    assert not load_spec(resolve_model(str(tmp_path))).tie_embeddings


def test_chunks_of_a_large_head(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxengine.weights import head as module

    monkeypatch.setattr(module, "_CHUNK", 64 * 7)  # 320 rows are no whole chunks
    same = embeddings("llama")
    copy("llama", tmp_path, True, **{HEAD: same})
    assert load_spec(resolve_model(str(tmp_path))).tie_embeddings
    other = same.copy()
    other[319, 63] = -other[319, 63]
    copy("llama", tmp_path, True, **{HEAD: other})
    assert not load_spec(resolve_model(str(tmp_path))).tie_embeddings


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_f30_equal_copies_are_tied(
    name: str, kind: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No second array; also where the copy was saved in another type."""
    embed = embeddings(name).astype(ml_dtypes.bfloat16).astype(np.float32)
    copy(name, tmp_path, True, **{EMBED: embed, HEAD: embed.astype(kind)})
    with caplog.at_level(logging.WARNING):
        params = load(tmp_path)
    assert "head" not in params and not caplog.records
    np.testing.assert_array_equal(params["embed"], embed)


def test_tied_and_saved_by_the_name_of_the_head(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    embed = embeddings("llama")
    copy("llama", tmp_path, True, **{EMBED: None, HEAD: embed})
    with caplog.at_level(logging.WARNING):
        params = load(tmp_path)
    assert "head" not in params and not caplog.records
    np.testing.assert_array_equal(params["embed"], embed)
    copy("llama", tmp_path, False, **{EMBED: None, HEAD: embed})
    with pytest.raises(ModelLoadError, match=rf"lacks tensor {EMBED}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["llama", "gemma2", "smollm3"])
def test_without_the_field_the_file_decides(name: str, tmp_path: pathlib.Path) -> None:
    copy(name, tmp_path, None, **{HEAD: None})
    assert "head" not in load(tmp_path)
    head = embeddings(name)[::-1].copy()
    copy(name, tmp_path, None, **{HEAD: head})
    np.testing.assert_array_equal(load(tmp_path)["head"], head)


def test_head_of_the_text_model_inside(tmp_path: pathlib.Path) -> None:
    inner = json.loads((GOLDENS / "gemma3" / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    have = load_file(GOLDENS / "gemma3" / "model.safetensors")
    head = have[EMBED][::-1].copy()
    save_file(
        {f"language_model.{k}": v for k, v in (have | {HEAD: head}).items()},
        tmp_path / "model.safetensors",
    )
    np.testing.assert_array_equal(load(tmp_path)["head"], head)


def test_b70_a_lost_head_is_no_tied_model(tmp_path: pathlib.Path) -> None:
    """An index that promises a head, a last part that is not there, a head in another form."""
    have = copy("llama", tmp_path, False)
    body = {k: v for k, v in have.items() if k != HEAD}
    (tmp_path / "model.safetensors").unlink()
    save_file(body, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelLoadError, match=r"lacks model-00002-of-00002\.safetensors, a part"):
        load(tmp_path)
    last = "model-00002-of-00002.safetensors"
    names = {k: last if k == HEAD else "model-00001-of-00002.safetensors" for k in have}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelLoadError, match=r"names the shard model-00002-of-00002\.safetensors"):
        load(tmp_path)
    save_file({"other": have[HEAD]}, tmp_path / last)
    with pytest.raises(ModelLoadError, match=rf"promises tensor {HEAD} in {last}, which lacks it"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"lm_head.qweight": have[HEAD]}, tmp_path / last)
    with pytest.raises(ModelLoadError, match=rf"lacks tensor {HEAD}"):
        load(tmp_path)


def test_part_of_a_model_is_not_tied(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As draft heads are, which borrow the head of another model."""
    copy("llama", tmp_path, False, **{HEAD: None, "model.norm.weight": None})
    with caplog.at_level(logging.WARNING):
        assert not load_spec(resolve_model(str(tmp_path))).tie_embeddings
    assert not caplog.records


def test_configuration_alone(tmp_path: pathlib.Path) -> None:
    shutil.copyfile(GOLDENS / "llama" / "config.json", tmp_path / "config.json")
    assert not load_spec(resolve_model(str(tmp_path))).tie_embeddings
