"""GGUF metadata in its other legal forms: the same model as in the plain one."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
from test_weights_gguf import load, twin_tensors
from testdata import GOLDENS

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.models.families import spec_from_gguf
from jaxengine.models.spec import DecoderSpec, RopeSpec
from jaxengine.weights.gguf import gguf_metadata
from jaxengine.weights.load import load_spec
from jaxengine.weights.resolve import resolve_model

T = gguf.GGUFValueType
LAYERS, HEADS, KV, WIDTH, FFN, CONTEXT = 3, 4, 2, 64, 112, 512  # of the golden "llama"


def plain(arch: str = "llama") -> dict[str, Any]:
    return {
        "general.architecture": arch,
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": CONTEXT,
        f"{arch}.embedding_length": WIDTH,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
    }


SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}


def spec(arch: str = "llama", *, without: str | None = None, **changes: Any) -> DecoderSpec:
    """Keys are given without their prefix, with __ for the points."""
    metadata = plain(arch)
    for key, value in changes.items():
        metadata[f"{arch}.{key.replace('__', '.')}"] = value
    metadata.pop(f"{arch}.{without}", None)
    return spec_from_gguf(metadata, SHAPES)


PLAIN = spec()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention__head_count", HEADS),
        ("attention__head_count_kv", KV),
        ("feed_forward_length", FFN),
        ("attention__key_length", 16),
        ("attention__value_length", 16),
        ("rope__dimension_count", 16),
    ],
)
def test_arrays_for_each_layer(key: str, value: int) -> None:
    for form in ([value] * LAYERS, [value], [float(value)] * LAYERS, float(value)):
        assert spec(**{key: form}) == PLAIN
    name = "llama." + key.replace("__", ".")
    differ = [value] * (LAYERS - 1) + [value * 2]
    with pytest.raises(UnsupportedModelError, match=f"GGUF key {name} .* differ by layer"):
        spec(**{key: differ})
    with pytest.raises(UnsupportedModelError, match=f"{name} has 2 entries for 3 layers"):
        spec(**{key: [value, value]})
    with pytest.raises(UnsupportedModelError, match=f"{name} must be a whole number, not 'x'"):
        spec(**{key: "x"})
    with pytest.raises(UnsupportedModelError, match=f"{name} must be a whole number"):
        spec(**{key: value + 0.5})


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length"])
def test_sizes_as_floats_and_missing(key: str) -> None:
    value = plain()[f"llama.{key}"]
    assert spec(**{key: float(value)}) == PLAIN
    for absent in (spec_without, spec_with_none):
        with pytest.raises(UnsupportedModelError, match=rf"GGUF lacks llama\..*{key}"):
            absent(key)


def spec_without(key: str) -> DecoderSpec:
    return spec(without=key)


def spec_with_none(key: str) -> DecoderSpec:
    return spec(**{key: None})


def test_optional_keys_missing() -> None:
    assert spec(without="attention.head_count_kv").num_kv_heads == HEADS
    assert spec(attention__layer_norm_rms_epsilon=None).norm_eps == 1e-6
    assert spec(vocab_size=320) == PLAIN  # the embeddings have a row for each token
    assert spec(vocab_size=None) == PLAIN and spec(expert_count=0.0) == PLAIN
    assert spec(attention__causal=True) == PLAIN == spec(attention__causal=1)
    with pytest.raises(UnsupportedModelError, match="without causal attention"):
        spec(attention__causal=False)
    with pytest.raises(ModelLoadError, match="lacks tensor token_embd.weight"):
        spec_from_gguf(plain(), {"output.weight": (320, 64)})


@pytest.mark.parametrize("written", ["LLaMA", "Llama", " llama", "QWEN2"])
def test_architecture_in_another_case(written: str) -> None:
    metadata = plain(written.strip())
    metadata["general.architecture"] = written
    want = spec("qwen2") if "QWEN" in written else PLAIN
    assert spec_from_gguf(metadata, SHAPES) == want


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "none"},
        {"type": "None"},
        {"type": ""},
        {"type": None},
        {"type": "linear"},
        {"type": "linear", "factor": 1.0},
        {"type": "linear", "factor": 0.0},
        {"type": "yarn", "factor": 1.0, "original_context_length": 512},
        {"type": "yarn"},
        {"factor": 1},
        {"type": "none", "factor": 8.0},
        {"attn_factor": 1.0},
        {"type": "none", "yarn_ext_factor": 0.5, "yarn_log_multiplier": 0.1},
    ],
)
def test_ways_to_say_no_scaling(scaling: dict[str, Any]) -> None:
    assert spec(**{f"rope__scaling__{k}": v for k, v in scaling.items()}) == PLAIN
    old = {f"rope__scaling__{k}": v for k, v in scaling.items()}
    if scaling.get("type") == "none":
        assert spec(**old, rope__scale_linear=4.0) == PLAIN


def test_scaling() -> None:
    linear = RopeSpec(kind="linear", factor=4.0)
    assert spec(rope__scaling__type="linear", rope__scaling__factor=4).rope == linear
    assert spec(rope__scaling__factor=4.0).rope == linear  # without a type it is linear
    assert spec(rope__scale_linear=4.0).rope == linear  # its first name
    yarn = spec(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=128.0,
        rope__scaling__yarn_ext_factor=-1.0,
        rope__scaling__yarn_log_multiplier=0.0,
        rope__scaling__yarn_beta_fast=16,
    )
    assert yarn.rope == RopeSpec(kind="yarn", factor=4.0, original_max_position=128, beta_fast=16.0)
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        with pytest.raises(UnsupportedModelError, match=f"rope.scaling.{key} is not supported"):
            spec(
                rope__scaling__type="yarn",
                rope__scaling__factor=4.0,
                **{f"rope__scaling__{key}": 0.5},
            )
    with pytest.raises(UnsupportedModelError, match="rope type 'dynamic'"):
        spec(rope__scaling__type="dynamic", rope__scaling__factor=2.0)
    with pytest.raises(UnsupportedModelError, match="rope.freq_base must be a number"):
        spec(rope__freq_base="10000")
    ones = np.ones(8, np.float32)
    same = spec_from_gguf(plain(), SHAPES, ones).rope
    assert (same.kind, same.factor) == ("llama3", 1.0)
    with pytest.raises(UnsupportedModelError, match="rope_freqs.weight with rope.scaling.type"):
        spec_from_gguf({**plain(), "llama.rope.scaling.factor": 2.0}, SHAPES, ones)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_no_window(arch: str) -> None:
    want = spec(arch)
    none = {"attention__sliding_window_pattern": [False] * LAYERS, "attention__sliding_window": 24}
    for keys in (
        {"attention__sliding_window": 0},
        {"attention__sliding_window": None},
        {"attention__sliding_window": [0] * LAYERS},
        {"attention__sliding_window": CONTEXT},
        {"attention__sliding_window_pattern": [True] * LAYERS},
        {"attention__sliding_window": 24, "attention__sliding_window_pattern": 1},
        none,
    ):
        assert spec(arch, **keys) == want, keys


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_windows_by_layer(arch: str) -> None:
    size, pattern = "attention__sliding_window", "attention__sliding_window_pattern"

    def windows(sizes: Any, layers: Any) -> tuple[int, ...]:
        return spec(arch, **{size: sizes, pattern: layers}).windows

    for marks in ([True, False, True], [1, 0, 1], [1.0, 0.0, 1.0]):
        assert windows(24, marks) == (24, 0, 24)
        assert windows([24, 24, 24], marks) == (24, 0, 24)
    assert windows(24, 3) == (24, 24, 0)  # every third has none
    assert windows(24, 0) == (24, 24, 24)
    with pytest.raises(UnsupportedModelError, match="sliding_window_pattern must be a switch for"):
        windows(24, [True, False])
    with pytest.raises(UnsupportedModelError, match="sliding_window has sizes that differ"):
        windows([24, 16, 24], [True] * 3)
    with pytest.raises(UnsupportedModelError, match="sliding_window must be a whole number, or"):
        windows("24", [True] * 3)
    with pytest.raises(UnsupportedModelError, match="freq_base_swa is not supported"):
        spec(arch, **{size: 24, pattern: 0, "rope__freq_base": 1e4, "rope__freq_base_swa": 5e5})


def test_window_of_llama_and_of_others() -> None:
    assert spec(attention__sliding_window=[24, 0, 24]).windows == (24, 0, 24)
    assert spec(attention__sliding_window=24.0).windows == (24, 24, 24)
    with pytest.raises(UnsupportedModelError, match="architecture qwen2 with a sliding window"):
        spec("qwen2", attention__sliding_window=24)


# Real files


def write(
    path: pathlib.Path,
    tensors: dict[str, np.ndarray],
    add: Callable[[gguf.GGUFWriter], None] = lambda w: None,
    kind: T = T.UINT32,
) -> None:
    """The golden "llama" with sizes of the type `kind`, and whatever `add` writes."""
    w = gguf.GGUFWriter(path, "llama")
    for key, value in plain().items():
        if key == "llama.attention.layer_norm_rms_epsilon":
            w.add_float64(key, value)
        elif key != "general.architecture":
            w.add_key_value(key, float(value) if "FLOAT" in kind.name else value, kind)
    add(w)
    for name, array in tensors.items():
        w.add_tensor(name, np.ascontiguousarray(array, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize(
    "kind",
    [T.UINT16, T.INT16, T.UINT32, T.INT32, T.UINT64, T.INT64, T.FLOAT32, T.FLOAT64],
    ids=lambda t: t.name,
)
def test_numbers_of_every_width(kind: T, tmp_path: pathlib.Path) -> None:
    write(tmp_path / "m.gguf", twin_tensors("llama")[1], kind=kind)
    spec = load_spec(resolve_model(str(tmp_path / "m.gguf")))
    assert spec == load_spec(resolve_model(str(GOLDENS / "llama")))


def test_arrays_in_a_real_file(tmp_path: pathlib.Path) -> None:
    def add(w: gguf.GGUFWriter) -> None:
        w.add_array("llama.attention.sliding_window_pattern", [False, False, False])
        w.add_uint8("llama.attention.causal", 1)
        w.add_array("llama.rope.dimension_count", [16] * LAYERS)
        w.add_uint32("llama.attention.sliding_window", 24)

    path = tmp_path / "m.gguf"
    write(path, twin_tensors("llama")[1], add)
    assert gguf_metadata(path)["llama.attention.sliding_window_pattern"] == [False] * 3
    assert load_spec(resolve_model(str(path))) == load_spec(resolve_model(str(GOLDENS / "llama")))


def test_upper_case_suffix_and_split_names(tmp_path: pathlib.Path) -> None:
    tensors = twin_tensors("llama")[1]
    write(tmp_path / "M.GGUF", tensors)
    for place in (tmp_path / "M.GGUF", tmp_path):
        assert load_spec(resolve_model(str(place))).hidden_size == WIDTH
    names = list(tensors)
    for no in (0, 1):
        part = {n: tensors[n] for n in (names[:9], names[9:])[no]}

        def add(w: gguf.GGUFWriter, no: int = no) -> None:
            w.add_uint64("split.no", no)
            w.add_int32("split.count", 2)

        write(tmp_path / f"S-0000{no + 1}-of-00002.GGUF", part, add)
    files = resolve_model(str(tmp_path / "S-00001-of-00002.GGUF"))
    assert len(files.paths) == 2 and len(load(files)["layers"]) == LAYERS


def test_other_files_beside_a_model(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "m.gguf", twin_tensors("llama")[1])
    for name in ("._m.gguf", "m.gguf.part", "README.md"):
        (tmp_path / name).write_bytes(b"x")
    assert resolve_model(str(tmp_path)).path == tmp_path / "m.gguf"


def test_f30_head_that_is_a_copy_is_tied(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = twin_tensors("llama")[1]
    path = tmp_path / "m.gguf"
    write(path, {**tensors, "output.weight": tensors["token_embd.weight"]})
    with caplog.at_level(logging.WARNING):
        files = resolve_model(str(path))
        assert load_spec(files).tie_embeddings and "head" not in load(files)
        write(path, tensors)
        files = resolve_model(str(path))
        np.testing.assert_array_equal(load(files)["head"], tensors["output.weight"])
        del tensors["output.weight"]
        write(path, tensors)
        assert "head" not in load(resolve_model(str(path)))
    assert not caplog.records  # the format has no field that would say another thing
