"""GGUF: tiny models written with gguf.GGUFWriter against their safetensors twins (B69)."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from testdata import GOLDENS

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.models.families.gguf import llama3_parameters
from jaxengine.weights import safetensors
from jaxengine.weights.gguf import gguf_metadata, read_gguf, read_rows
from jaxengine.weights.load import checkpoint_dtype, load_params, load_spec
from jaxengine.weights.resolve import ModelFiles, resolve_model

Q = gguf.GGMLQuantizationType
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """The reordering that converters give q and k of "llama"."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def twin_tensors(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = json.loads((GOLDENS / name / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for key, stored in safetensors.read_folder(GOLDENS / name).items():
        w = safetensors.read_rows(stored, 0, stored.shape[0])
        if config["model_type"] == "llama" and (".q_proj" in key or ".k_proj" in key):
            heads = "num_attention_heads" if ".q_proj" in key else "num_key_value_heads"
            w = interleave(w, config[heads])
        tensors[gguf_name(key)] = w
    return config, tensors


def write(
    path: pathlib.Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    quant: dict[str, Q] | None = None,
    extra: dict[str, int] | None = None,
) -> None:
    """One GGUF file; `quant` maps the end of a tensor's name to its type (default F32)."""
    w = gguf.GGUFWriter(path, config["model_type"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    )
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in (extra or {}).items():
        w.add_uint16(key, value)
    for name, array in tensors.items():
        kind = next((q for end, q in (quant or {}).items() if name.endswith(end)), Q.F32)
        if kind == Q.F32:
            w.add_tensor(name, array.astype(np.float32))
        else:
            w.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def load(files: ModelFiles, dtype: str = "float32") -> dict[str, Any]:
    return load_params(files, load_spec(files), dtype, lambda x: x, progress=False)


def assert_equal_trees(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> None:
    assert got.keys() == want.keys()
    assert len(got["layers"]) == len(want["layers"])
    pairs = [(got[k], want[k], k) for k in want if k != "layers"]
    for i, (a, b) in enumerate(zip(got["layers"], want["layers"], strict=True)):
        assert a.keys() == b.keys()
        pairs += [(a[k], b[k], f"{i}.{k}") for k in b]
    for a, b, name in pairs:
        assert a.shape == b.shape, name
        scale = float(np.abs(b).max()) or 1.0
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    "name", ["llama", "llama-gqa-tied-bias", "llama-linear-rope", "qwen2", "qwen3"]
)
def test_b69_f32_twin_is_equal(name: str, tmp_path: pathlib.Path) -> None:
    config, tensors = twin_tensors(name)
    path = tmp_path / "twin.gguf"
    write(path, config, tensors)
    hf, twin = resolve_model(str(GOLDENS / name)), resolve_model(str(path))
    assert_equal_trees(load(twin), load(hf), 0.0)
    a, b = load_spec(twin), load_spec(hf)
    same = dict(rope=b.rope, norm_eps=b.norm_eps)  # no rotary scaling written; eps is float32
    assert dataclasses.replace(a, **same) == b
    assert abs(a.norm_eps - b.norm_eps) < 1e-11


@pytest.mark.parametrize(
    ("quant", "tolerance"),
    [
        ({".weight": Q.F16, "norm.weight": Q.F32}, 1e-3),
        ({"norm.weight": Q.F32, ".weight": Q.BF16}, 5e-3),
        ({"norm.weight": Q.F32, "ffn_down.weight": Q.F32, ".weight": Q.Q8_0}, 0.01),
        ({"attn_q.weight": Q.Q4_0, "attn_k.weight": Q.Q5_1, "token_embd.weight": Q.Q8_0}, 0.13),
    ],
)
def test_b69_quantised_twin(quant: dict[str, Q], tolerance: float, tmp_path: pathlib.Path) -> None:
    config, tensors = twin_tensors("llama")
    quant = {"norm.weight": Q.F32, **quant}
    path = tmp_path / "twin.gguf"
    write(path, config, tensors, quant)
    got, want = load(resolve_model(str(path))), load(resolve_model(str(GOLDENS / "llama")))
    assert_equal_trees(got, want, tolerance)


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q3_K, Q.Q5_0, Q.Q4_1, Q.IQ4_NL])
def test_b69_blocks_and_row_order(kind: Q, tmp_path: pathlib.Path) -> None:
    """Any block type: rows and heads come out as from dequantising first and reordering after."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 64, (96, 512 // block * size), dtype=np.uint8)
    w = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    w.add_tensor("x.weight", raw, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    _, tensors = read_gguf((tmp_path / "x.gguf",))
    want = gguf.dequantize(raw, kind)
    np.testing.assert_array_equal(read_rows(tensors["x.weight"], 0, 96), want)
    np.testing.assert_array_equal(read_rows(tensors["x.weight"], 32, 49), want[32:49])
    heads = interleave(want, 3)
    assert not np.array_equal(heads, want)
    raw_heads = interleave(raw, 3)
    with (tmp_path / "x.gguf").open("r+b") as f:
        f.seek(tensors["x.weight"].offset)
        f.write(raw_heads.tobytes())
    np.testing.assert_array_equal(read_rows(tensors["x.weight"], 32, 64, head_dim=32), want[32:64])


def test_b69_tied_output_uses_embeddings(tmp_path: pathlib.Path) -> None:
    config, tensors = twin_tensors("llama")
    del tensors["output.weight"]
    write(tmp_path / "tied.gguf", config, tensors)
    files = resolve_model(str(tmp_path / "tied.gguf"))
    assert load_spec(files).tie_embeddings
    assert "head" not in load(files)


def test_b69_truncated_file(tmp_path: pathlib.Path) -> None:
    config, tensors = twin_tensors("llama")
    path = tmp_path / "cut.gguf"
    write(path, config, tensors)
    data = path.read_bytes()
    for size in (0, 3, 20, 200, 2000, len(data) - 40):
        path.write_bytes(data[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf .*(truncated|cannot be read)"):
            load_spec(resolve_model(str(path)))


def test_b69_unknown_quantisation_and_magic(tmp_path: pathlib.Path) -> None:
    config, tensors = twin_tensors("llama")
    path = tmp_path / "odd.gguf"
    write(path, config, {k: v for k, v in tensors.items() if k == "output_norm.weight"})
    data = path.read_bytes()
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(UnsupportedModelError, match="output_norm.weight has unknown quant.* 99"):
        load_spec(resolve_model(str(path)))
    path.write_bytes(b"XXXX" + data[4:])
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        load_spec(resolve_model(str(path)))
    path.write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    with pytest.raises(UnsupportedModelError, match="version 1"):
        load_spec(resolve_model(str(path)))
    path.write_bytes(data[:4] + (3).to_bytes(4, "big") + data[8:])
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        load_spec(resolve_model(str(path)))


def test_b69_missing_tensor_and_shape(tmp_path: pathlib.Path) -> None:
    config, tensors = twin_tensors("llama")
    less = {k: v for k, v in tensors.items() if k != "blk.1.attn_k.weight"}
    write(tmp_path / "a.gguf", config, less)
    with pytest.raises(ModelLoadError, match=r"a\.gguf lacks tensor blk\.1\.attn_k\.weight"):
        load(resolve_model(str(tmp_path / "a.gguf")))
    bent = {**tensors, "blk.2.attn_v.weight": tensors["blk.2.attn_q.weight"]}
    write(tmp_path / "b.gguf", config, bent)
    with pytest.raises(ModelLoadError, match=r"blk\.2\.attn_v\.weight has shape \[64, 64\] inst"):
        load(resolve_model(str(tmp_path / "b.gguf")))


def test_b69_split_files(tmp_path: pathlib.Path) -> None:
    config, tensors = twin_tensors("llama")
    names = list(tensors)
    for no, part in enumerate((names[:9], names[9:])):
        path = tmp_path / f"m-0000{no + 1}-of-00002.gguf"
        extra = {"split.no": no, "split.count": 2}
        write(path, config, {n: tensors[n] for n in part}, extra=extra)
    first, second = sorted(tmp_path.glob("*.gguf"))
    files = resolve_model(str(first))
    assert files.paths == (first, second) and files.name == "m"
    assert_equal_trees(load(files), load(resolve_model(str(GOLDENS / "llama"))), 0.0)
    with pytest.raises(ModelLoadError, match="later part of a split model: give m-00001-of-00002"):
        resolve_model(str(second))
    with pytest.raises(ModelLoadError, match="one of 2 parts"):
        read_gguf((first,))
    second.unlink()
    with pytest.raises(ModelLoadError, match="m-00002-of-00002.gguf, a part of the split model"):
        resolve_model(str(first))


def test_llama3_rotary_scaling_is_recovered(tmp_path: pathlib.Path) -> None:
    half, theta, factor, original = 64, 500000.0, 8.0, 8192
    divisors = []
    for i in range(half):  # as published: three bands of wavelengths
        wave = 2 * np.pi * theta ** (i / half)
        if wave < original / 4:
            divisors.append(1.0)
        elif wave > original / 1:
            divisors.append(factor)
        else:
            smooth = (original / wave - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    found = llama3_parameters(np.array(divisors, np.float32), theta)
    assert found["rope_type"] == "llama3" and found["factor"] == factor
    with pytest.raises(UnsupportedModelError, match="not the rotary scaling"):
        llama3_parameters(np.linspace(1, 8, half), theta)


def test_demo_model(caplog: pytest.LogCaptureFixture) -> None:
    files = resolve_model("demo")
    assert files.kind == "gguf" and files.name == "SmolLM2-135M-Instruct"
    assert checkpoint_dtype(files) == "quantized"
    spec = load_spec(files)
    assert (spec.num_layers, spec.hidden_size, spec.num_kv_heads) == (30, 576, 3)
    assert spec.tie_embeddings and spec.rope.theta == 100000.0 and spec.max_position == 8192
    with caplog.at_level(logging.WARNING):
        params = load_params(files, spec, "bfloat16", lambda x: x, progress=False)
    assert not caplog.records
    assert params["embed"].shape == (49152, 576) and params["embed"].dtype == ml_dtypes.bfloat16
    assert params["layers"][29]["qkv"].shape == ((9 + 6) * 64, 576)
    assert all(np.isfinite(np.float32(layer["down"])).all() for layer in params["layers"])


def test_metadata_types(tmp_path: pathlib.Path) -> None:
    w = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    w.add_array("a.ints", [1, -2, 3])
    w.add_array("a.texts", ["x", "é", ""])
    w.add_array("a.floats", [0.5, 2.0])
    w.add_bool("a.flag", True)
    w.add_float64("a.double", 0.25)
    w.add_int64("a.long", -(2**40))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    got = gguf_metadata(tmp_path / "m.gguf")
    assert got["a.ints"] == [1, -2, 3] and got["a.texts"] == ["x", "é", ""]
    assert got["a.floats"] == [0.5, 2.0] and got["a.flag"] is True
    assert got["a.double"] == 0.25 and got["a.long"] == -(2**40)
