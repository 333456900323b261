"""Experts in every published naming, MXFP4, joined checkpoints, and text models inside others."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from testdata import GOLDENS

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.models.params import param_shapes
from jaxengine.weights.load import load_params, load_spec
from jaxengine.weights.mxfp4 import dequantise
from jaxengine.weights.resolve import resolve_model

MOE = ["mixtral", "qwen3-moe", "olmoe", "deepseek-v2", "deepseek-v3", "gpt-oss"]
DENSE = ["gemma2", "gemma3", "phi3", "smollm3", "granite", "olmo2"]
Tensors = dict[str, np.ndarray]


def load(folder: pathlib.Path, dtype: str = "float32", **how: Any) -> dict[str, Any]:
    files = resolve_model(str(folder))
    return load_params(files, load_spec(files), dtype, lambda x: x, progress=False, **how)


def save(folder: pathlib.Path, tensors: Tensors, config: dict[str, Any]) -> pathlib.Path:
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def golden(name: str) -> tuple[Tensors, dict[str, Any]]:
    config = json.loads((GOLDENS / name / "config.json").read_text())
    return load_file(GOLDENS / name / "model.safetensors"), config


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", MOE + DENSE)
def test_tree_is_as_its_shapes_say(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        params = load(GOLDENS / name, "bfloat16")
    assert not caplog.records
    shapes = param_shapes(load_spec(resolve_model(str(GOLDENS / name))), "bfloat16")
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    jax.tree.map(lambda a, s: np.testing.assert_equal((a.shape, a.dtype), (s.shape, s.dtype)),
                 params, shapes)  # fmt: skip


def renamed(tensors: Tensors, form: str) -> Tensors:
    """Qwen3-MoE's tensors under another naming."""
    out = {k: v for k, v in tensors.items() if ".mlp." not in k}
    for i in range(3):
        mlp, moe = f"model.layers.{i}.mlp.", f"model.layers.{i}.block_sparse_moe."
        gate, up, down = (
            np.stack([tensors[f"{mlp}experts.{e}.{p}_proj.weight"] for e in range(8)])
            for p in ("gate", "up", "down")
        )
        joined = np.concatenate([gate, up], 1)
        router = tensors[mlp + "gate.weight"]
        if form == "mixtral":
            out[moe + "gate.weight"] = router
            for e in range(8):
                for w, x in (("w1", gate), ("w2", down), ("w3", up)):
                    out[f"{moe}experts.{e}.{w}.weight"] = x[e]
        if form == "stack":
            out[mlp + "gate.weight"] = router
            out |= {mlp + "experts.gate_up_proj": joined, mlp + "experts.down_proj": down}
        if form == "stack [E, in, out]":
            out[mlp + "router.weight"] = router
            out[mlp + "experts.gate_up_proj"] = joined.swapaxes(1, 2)
            out[mlp + "experts.down_proj"] = down.swapaxes(1, 2)
    return out


@pytest.mark.parametrize("form", ["mixtral", "stack", "stack [E, in, out]"])
def test_other_namings(form: str, tmp_path: pathlib.Path) -> None:
    tensors, config = golden("qwen3-moe")
    other = renamed(tensors, form)
    assert set(other) != set(tensors)
    same(load(save(tmp_path, other, config)), load(GOLDENS / "qwen3-moe"))


def test_stack_holds_gate_then_up_of_every_expert() -> None:
    tensors, _ = golden("deepseek-v3")
    got = load(GOLDENS / "deepseek-v3")["layers"][2]
    experts = "model.layers.2.mlp.experts.5."
    want = [tensors[f"{experts}{p}_proj.weight"] for p in ("gate", "up")]
    np.testing.assert_array_equal(got["experts_gate_up"][5], np.concatenate(want))
    np.testing.assert_array_equal(got["experts_down"][5], tensors[experts + "down_proj.weight"])


def test_rotary_pairs_become_halves() -> None:
    tensors, _ = golden("deepseek-v2")
    got = load(GOLDENS / "deepseek-v2")["layers"][1]
    raw = tensors["model.layers.1.self_attn.q_proj.weight"].reshape(4, 24, 64)
    head = got["q"].reshape(4, 24, 64)
    np.testing.assert_array_equal(head[:, :16], raw[:, :16])
    np.testing.assert_array_equal(head[:, 16:20], raw[:, 16::2])
    np.testing.assert_array_equal(head[:, 20:], raw[:, 17::2])
    key = tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    np.testing.assert_array_equal(got["kv_a"][32:36], key[32::2])


def test_missing_and_wrong_experts(tmp_path: pathlib.Path) -> None:
    tensors, config = golden("mixtral")
    lost = "model.layers.1.block_sparse_moe.experts.6.w2.weight"
    rest = {k: v for k, v in tensors.items() if k != lost}
    with pytest.raises(ModelLoadError, match=f"lacks tensor {lost}"):
        load(save(tmp_path, rest, config))
    tensors[lost] = tensors[lost][:, :-1]
    with pytest.raises(ModelLoadError, match=r"experts\.6\.w2\.weight has shape \[64, 111\] inst"):
        load(save(tmp_path, tensors, config))


def test_joined_and_single_projections_mean_the_same(tmp_path: pathlib.Path) -> None:
    tensors, config = golden("phi3")
    single = {k: v for k, v in tensors.items() if "qkv_proj" not in k and "gate_up" not in k}
    for i in range(3):
        p = f"model.layers.{i}."
        parts = np.split(tensors[p + "self_attn.qkv_proj.weight"], [64, 96])
        single |= {f"{p}self_attn.{n}_proj.weight": x for n, x in zip("qkv", parts, strict=True)}
        gate, up = np.split(tensors[p + "mlp.gate_up_proj.weight"], 2)
        single |= {p + "mlp.gate_proj.weight": gate, p + "mlp.up_proj.weight": up}
    same(load(save(tmp_path, single, config)), load(GOLDENS / "phi3"))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_model_inside(
    prefix: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, config = golden("gemma3")
    inside = {prefix + k.removeprefix("model."): v for k, v in tensors.items()}
    inside["vision_tower.encoder.weight"] = np.zeros(3, np.float32)
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    with caplog.at_level(logging.WARNING):
        same(load(save(tmp_path, inside, outer)), load(GOLDENS / "gemma3"))
    assert not caplog.records


def test_layers_past_the_last_are_left_out(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, config = golden("deepseek-v3")
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    with caplog.at_level(logging.WARNING):
        same(load(save(tmp_path, tensors, config)), load(GOLDENS / "deepseek-v3"))
    assert not caplog.records


# -- MXFP4 ------------------------------------------------------------------------------------


def four_bits(code: int) -> float:
    """By the format: sign, 2 bits of exponent with bias 1, 1 bit of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -value if code & 8 else value


def test_mxfp4_values() -> None:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (2, 3, 2, 16), np.uint8)
    blocks[0, 0, 0] = np.arange(16) * 17 % 256
    scales = rng.integers(100, 140, (2, 3, 2), np.uint8)
    got = dequantise(blocks, scales)
    assert got.shape == (2, 3, 64) and got.dtype == np.float32
    for e, r, j in np.ndindex(2, 3, 64):
        byte = int(blocks[e, r, j // 32, j % 32 // 2])
        code = byte >> 4 if j % 2 else byte & 15
        assert got[e, r, j] == four_bits(code) * 2.0 ** (int(scales[e, r, j // 32]) - 127)


def quantised_gpt_oss(folder: pathlib.Path) -> tuple[pathlib.Path, Tensors]:
    """The golden with random MXFP4 experts; returns the wide stacks [E, out, in] too."""
    tensors, config = golden("gpt-oss")
    config |= {"intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    rng, wide = np.random.default_rng(5), {}
    for i in range(4):
        p = f"model.layers.{i}.mlp.experts."
        for leaf, out in (("gate_up_proj", 128), ("down_proj", 64)):
            del tensors[p + leaf]
            blocks = rng.integers(0, 256, (8, out, 2, 16), np.uint8)
            scales = rng.integers(118, 124, (8, out, 2), np.uint8)
            tensors |= {f"{p}{leaf}_blocks": blocks, f"{p}{leaf}_scales": scales}
            wide[p + leaf] = dequantise(blocks, scales)
        tensors[p + "gate_up_proj_bias"] = tensors[p + "gate_up_proj_bias"][:, :128]
    return save(folder, tensors, config), wide


def test_mxfp4_checkpoint(tmp_path: pathlib.Path) -> None:
    folder, wide = quantised_gpt_oss(tmp_path)
    got = load(folder, "bfloat16")["layers"][3]
    stack = wide["model.layers.3.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(got["experts_gate_up"][:, :64], stack[:, 0::2])
    np.testing.assert_array_equal(got["experts_gate_up"][:, 64:], stack[:, 1::2])
    np.testing.assert_array_equal(got["experts_down"], wide["model.layers.3.mlp.experts.down_proj"])


def test_mxfp4_is_for_experts_only(tmp_path: pathlib.Path) -> None:
    tensors, config = golden("gpt-oss")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = np.zeros((64, 64), np.uint8)
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight has type U8, which is not"):
        load(save(tmp_path, tensors, config))


def test_leaves_arrive_arranged_and_named() -> None:
    seen: dict[tuple[str | int, ...], tuple[int, ...]] = {}

    def place(path: tuple[str | int, ...], array: np.ndarray) -> np.ndarray:
        seen[path] = array.shape
        return array

    parts = load(GOLDENS / "qwen3-moe", place=place, tensor_size=4)["layers"][0]
    whole = load(GOLDENS / "qwen3-moe")["layers"][0]
    assert seen["layers", 0, "qkv"] == (128 + 2 * 4 * 32, 64)  # 2 kv heads, twice each
    np.testing.assert_array_equal(
        parts["experts_gate_up"][:, 12:24], whole["experts_gate_up"][:, 48:60]
    )
    np.testing.assert_array_equal(parts["experts_down"], whole["experts_down"])
