"""The extra layer of DeepSeek-V3: what it reads of a checkpoint, and its arithmetic."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from drafters import with_extra_layer
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from jaxengine.models.errors import ModelLoadError
from jaxengine.models.layers.attention import AttentionPlan
from jaxengine.runner.draft.mtp import extra_layer, mtp_shapes, one_layer, run_layer
from jaxengine.runner.draft.mtp_load import read_mtp
from jaxengine.runner.forward import StepConfig
from jaxengine.sched.batch import BatchShape
from jaxengine.weights.load import load_params, load_spec
from jaxengine.weights.resolve import resolve_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return with_extra_layer(tmp_path_factory.mktemp("mtp") / "model")


def test_the_layer_is_read_like_any_other(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its decoder part equals what the ordinary loader makes of a model with one layer more."""
    files = resolve_model(str(model))
    spec = load_spec(files)
    extended = extra_layer(spec, files)
    layer, others = read_mtp(files, extended, "float32")
    longer = load_params(files, extended, "float32", np.asarray, progress=False)
    assert layer.keys() == longer["layers"][-1].keys()
    for name, leaf in longer["layers"][-1].items():
        assert np.array_equal(layer[name], leaf), name
    shapes = mtp_shapes(extended, np.dtype(np.float32))
    assert {n: x.shape for n, x in others.items()} == {
        n: x.shape for n, x in shapes.items() if n != "layers"
    }
    assert {n: x.shape for n, x in layer.items()} == {
        n: x.shape for n, x in shapes["layers"][0].items()
    }
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="lacks tensor model.layers.3.eh_proj.weight"):
        read_mtp(resolve_model(str(tmp_path)), extended, "float32")


def norm(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    mean: NDArray[np.float32] = (x.astype("f8") ** 2).mean(-1, keepdims=True)
    return (x / np.sqrt(mean + 1e-5) * weight).astype("f4")


def test_its_input(model: pathlib.Path) -> None:
    """With attention and experts made silent the layer passes its input on."""
    files = resolve_model(str(model))
    spec = load_spec(files)
    extended = extra_layer(spec, files)
    layer, others = read_mtp(files, extended, "float32")
    silent = {"o", "experts_down", "shared_down"}
    params = {name: jnp.asarray(x) for name, x in others.items()}
    zeroed = {n: jnp.zeros_like(x) if n in silent else jnp.asarray(x) for n, x in layer.items()}
    tokens = 5
    plan = AttentionPlan(
        positions=jnp.arange(tokens),
        kv_slot=jnp.arange(tokens)[None],
        block_table=jnp.zeros((1, tokens, 1), jnp.int32),
        seq_len=jnp.arange(1, tokens + 1),
        q_start=jnp.arange(tokens + 1),
        num_tokens=jnp.int32(tokens),
        num_decode=jnp.int32(tokens),
        items=None,
        num_items=jnp.int32(0),
    )
    step = StepConfig(one_layer(extended), BatchShape(1, 1, 16, 1), 0, (1,))
    assert spec.mla is not None
    cache = jnp.zeros((1, 16, spec.mla.width), jnp.float32)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 320, tokens)
    hidden = rng.standard_normal((tokens, 64)).astype("f4")
    out, written = run_layer(
        step,
        {**params, "layers": [zeroed]},
        ((cache,),),
        jnp.asarray(ids),
        jnp.asarray(hidden),
        plan,
    )
    both = [norm(others["embed"][ids], others["token_norm"]), norm(hidden, others["hidden_norm"])]
    want = np.concatenate(both, -1) @ others["join"].T
    assert np.allclose(out, norm(want, np.ones(64, "f4")), atol=1e-4)
    assert np.abs(np.asarray(written[0][0][0])).sum(-1).nonzero()[0].tolist() == list(range(tokens))


def test_a_dense_layer_stays_dense(model: pathlib.Path) -> None:
    files = resolve_model(str(model))
    extended = extra_layer(load_spec(files), files)
    assert one_layer(extended).is_moe(0)
    dense = replace(extended, dense_layers=tuple(range(extended.num_layers)))
    assert not one_layer(dense).is_moe(0)
