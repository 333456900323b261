"""Safetensors checkpoints: trees, casts, and the ways a checkpoint can be incomplete (B70)."""

from __future__ import annotations

import json
import logging
import pathlib
import shutil
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from testdata import GOLDENS

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.weights.load import checkpoint_dtype, leaf_shape, load_params, load_spec
from jaxengine.weights.resolve import resolve_model

FAMILIES = ["llama", "llama-gqa-tied-bias", "llama3-rope", "llama-yarn", "mistral-window"]
FAMILIES += ["llama-linear-rope", "qwen2", "qwen3"]


def load(folder: pathlib.Path, dtype: str = "float32") -> dict[str, Any]:
    files = resolve_model(str(folder))
    return load_params(files, load_spec(files), dtype, lambda x: x, progress=False)


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> pathlib.Path:
    """A writable copy of the llama golden's config and weights."""
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / "llama" / file, tmp_path / file)
    return tmp_path


def change(folder: pathlib.Path, **changes: Any) -> None:
    """Rewrite the weights with some tensors replaced (None: removed)."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tree(name: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = GOLDENS / name
    spec = load_spec(resolve_model(str(folder)))
    raw = load_file(folder / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        params = load(folder, dtype)
    assert not caplog.records
    kind = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    for i, layer in enumerate(params["layers"]):
        for leaf, array in layer.items():
            assert array.shape == leaf_shape(spec, leaf) and array.dtype == kind
        prefix = f"model.layers.{i}."
        q, k, v = (raw[f"{prefix}self_attn.{p}_proj.weight"] for p in "qkv")
        np.testing.assert_array_equal(layer["qkv"], np.concatenate([q, k, v]).astype(kind))
        gate, up = (raw[f"{prefix}mlp.{p}_proj.weight"] for p in ("gate", "up"))
        np.testing.assert_array_equal(layer["gate_up"], np.concatenate([gate, up]).astype(kind))
        assert ("qkv_bias" in layer) == spec.qkv_bias and ("q_norm" in layer) == spec.qk_norm
    assert ("head" in params) != spec.tie_embeddings
    np.testing.assert_array_equal(params["embed"], raw["model.embed_tokens.weight"].astype(kind))


def test_put_gets_each_leaf_once(copy: pathlib.Path) -> None:
    files = resolve_model(str(copy))
    seen: list[tuple[int, ...]] = []
    params = load_params(
        files, load_spec(files), "float32", lambda x: seen.append(x.shape) or len(seen), False
    )
    assert len(seen) == 3 + 3 * 6
    assert params["embed"] == 1 and params["layers"][0]["attn_norm"] == 4


def test_memory_is_bounded(tmp_path: pathlib.Path) -> None:
    """Peak of what NumPy allocates: under 1.3 times the loaded bytes, and one tensor."""
    config = json.loads((GOLDENS / "llama" / "config.json").read_text())
    config |= {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "head_dim": 128,
    }
    config |= {"vocab_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_spec(resolve_model(str(tmp_path)))
    shapes = {"model.embed_tokens.weight": (8192, 512), "lm_head.weight": (8192, 512)}
    shapes["model.norm.weight"] = (512,)
    for i in range(6):
        p = f"model.layers.{i}."
        shapes |= {
            p + "self_attn.q_proj.weight": (512, 512),
            p + "self_attn.o_proj.weight": (512, 512),
        }
        shapes |= {p + f"self_attn.{x}_proj.weight": (256, 512) for x in "kv"}
        shapes |= {p + f"mlp.{x}_proj.weight": (2048, 512) for x in ("gate", "up")}
        shapes |= {p + "mlp.down_proj.weight": (512, 2048), p + "input_layernorm.weight": (512,)}
        shapes |= {p + "post_attention_layernorm.weight": (512,)}
    save_file(
        {n: np.ones(s, np.float32) for n, s in shapes.items()}, tmp_path / "model.safetensors"
    )
    files = resolve_model(str(tmp_path))
    tracemalloc.start()
    params = load_params(files, spec, "bfloat16", lambda x: x, progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = [params["embed"], params["head"], params["final_norm"]]
    arrays += [a for layer in params["layers"] for a in layer.values()]
    loaded = sum(a.nbytes for a in arrays)
    assert loaded <= peak < 1.3 * loaded + 8192 * 512 * 4


def test_b70_missing_shard(copy: pathlib.Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = list(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, copy / file)
    index = {"weight_map": {n: f for f, part in parts.items() for n in part}}
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = load(copy)
    reference = load(GOLDENS / "llama")
    np.testing.assert_array_equal(whole["layers"][2]["qkv"], reference["layers"][2]["qkv"])
    index["weight_map"]["ghost.weight"] = "a.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"promises tensor ghost\.weight in a\.safetensors"):
        load(copy)
    (copy / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"names the shard b\.safetensors, which is missing"):
        load(copy)
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../b.safetensors"}}')
    with pytest.raises(ModelLoadError, match="outside its folder"):
        load(copy)


def test_b70_missing_tensor(copy: pathlib.Path) -> None:
    change(copy, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelLoadError, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj"):
        load(copy)


def test_b70_wrong_shape(copy: pathlib.Path) -> None:
    change(copy, **{"lm_head.weight": np.zeros((319, 64), np.float32)})
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight has shape \[319, 64\] instead of"):
        load(copy)


def test_b70_extra_tensors(copy: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    one = np.zeros(4, np.float32)
    change(copy, **{"model.layers.0.self_attn.rotary_emb.inv_freq": one})
    with caplog.at_level(logging.WARNING):
        load(copy)
    assert not caplog.records
    change(copy, **{"model.vision.weight": one})
    with caplog.at_level(logging.WARNING):
        load(copy)
    assert "1 unknown tensors ignored, first model.vision.weight" in caplog.text


def test_b70_copy_of_tied_embeddings(copy: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other heads: tests/unit/weights/test_head.py."""
    config = json.loads((copy / "config.json").read_text()) | {"tie_word_embeddings": True}
    (copy / "config.json").write_text(json.dumps(config))
    change(copy, **{"lm_head.weight": load(GOLDENS / "llama")["embed"]})
    with caplog.at_level(logging.WARNING):
        assert "head" not in load(copy)
    assert not caplog.records


def test_b70_truncated(copy: pathlib.Path) -> None:
    path = copy / "model.safetensors"
    data = path.read_bytes()
    for size in (0, 5, 100, len(data) - 8):
        path.write_bytes(data[:size])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated"):
            load(copy)
    path.write_bytes((3).to_bytes(8, "little") + b"{x}" + data)
    with pytest.raises(ModelLoadError, match="damaged header"):
        load(copy)


def test_b70_bin_files(copy: pathlib.Path) -> None:
    (copy / "pytorch_model.bin").write_bytes(b"other weights")
    np.testing.assert_array_equal(load(copy)["embed"], load(GOLDENS / "llama")["embed"])
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        load(copy)
    (copy / "pytorch_model.bin").unlink()
    with pytest.raises(ModelLoadError, match="no .safetensors file"):
        load(copy)


def test_integer_weights_are_refused(copy: pathlib.Path) -> None:
    change(copy, **{"model.norm.weight": np.ones(64, np.int8)})
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has type I8"):
        load(copy)


def test_checkpoint_dtype(copy: pathlib.Path) -> None:
    assert checkpoint_dtype(resolve_model(str(GOLDENS / "llama"))) == "float32"
    config = json.loads((copy / "config.json").read_text())
    for key, value in (("torch_dtype", "torch.float16"), ("dtype", "bfloat16")):
        (copy / "config.json").write_text(json.dumps({**config, "dtype": None, key: value}))
        assert checkpoint_dtype(resolve_model(str(copy))) == value.removeprefix("torch.")
    (copy / "config.json").write_text(json.dumps({**config, "dtype": None}))
    change(copy, **{"model.embed_tokens.weight": np.zeros((20000, 64), ml_dtypes.bfloat16)})
    assert checkpoint_dtype(resolve_model(str(copy))) == "bfloat16"


def test_unknown_dtype(copy: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="dtype 'int3' is not one of"):
        load(copy, "int3")
