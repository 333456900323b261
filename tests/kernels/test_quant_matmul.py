"""Quantised products: XLA against NumPy, the kernel in GPU interpret mode."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels.quant_matmul import quant_matmul, quantise
from jaxengine.pallas_kernels.quant_matmul.config import Fp8Config, QuantConfig
from jaxengine.pallas_kernels.quant_matmul.reference import (
    dequantise,
    fp8_matmul,
    pack_int4,
    quantise_tokens,
    unpack_int4,
)


def relative(got: Any, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want))


def pair(seed: int, rows: int, outputs: int, inputs: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.standard_normal((outputs, inputs)), jnp.float32)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["int8", "int4", "fp8"]),
    st.sampled_from([0, 128]),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_product_is_float64s(kind: str, group: int, rows: int, seed: int) -> None:
    x, w = pair(seed, rows, 64, 256)
    q = quantise(w, kind, group)
    assert q.kind == kind
    wide = np.asarray(dequantise(q), np.float64)
    assert relative(quant_matmul(x, q), np.asarray(x, np.float64) @ wide.T) < 1e-5
    # What the format itself loses.
    assert relative(wide, np.asarray(w)) < {"int8": 0.02, "int4": 0.2, "fp8": 0.04}[kind]


def test_int4_packing_keeps_numbers() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-8, 8, (3, 256)).astype(np.int8)
    np.testing.assert_array_equal(unpack_int4(pack_int4(jnp.asarray(values))), values)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("group", [0, 128])
def test_kernel_is_float64s(kind: str, group: int) -> None:
    x, w = pair(1, 5, 64, 512)
    q, x = quantise(w, kind, group), x.astype(jnp.bfloat16)
    mg.reset_interpreter()
    config = QuantConfig(splits=2, stages=2)
    how: dict[str, Any] = {"backend": "mosaic", "config": config}
    got = quant_matmul(x, q, interpret=mg.interpret_params(True), **how)
    want = np.asarray(x, np.float32).astype(np.float64) @ np.asarray(dequantise(q), np.float64).T
    assert relative(got, want) < 3e-3
    assert not mg.races_found()


FP8 = {
    "decode, split": (5, 128, 512, Fp8Config(2, 2, 2, 8), False, None),
    "per tensor": (19, 64, 384, Fp8Config(1, 2, 1, 32), True, 0.01),
    "prefill": (130, 128, 256, Fp8Config(1, 2, 2, 128), False, None),
}


def run_fp8(name: str) -> float:
    """Relative error of a case."""
    rows, outputs, inputs, config, whole, x_scale = FP8[name]
    x, w = pair(2, rows, outputs, inputs)
    q, x = quantise(w, "fp8", whole=whole), x.astype(jnp.bfloat16)
    fixed = None if x_scale is None else jnp.float32(x_scale)
    how: dict[str, Any] = {"backend": "mosaic", "config": config, "x_scale": fixed}
    got = quant_matmul(x, q, interpret=mg.interpret_params(True), **how)
    values, scales = quantise_tokens(x, fixed)
    narrow = np.asarray(values, np.float32).astype(np.float64) * np.asarray(scales)[:, None]
    want = narrow @ np.asarray(dequantise(q), np.float64).T
    assert relative(fp8_matmul(x, q, fixed), want) < 3e-3
    return relative(got, want)


@pytest.mark.parametrize("name", FP8)
def test_fp8_kernel_is_float64s(name: str) -> None:
    mg.reset_interpreter()
    assert run_fp8(name) < 3e-3
    assert not mg.races_found()


def test_fixed_scale_saturates() -> None:
    values, scales = quantise_tokens(jnp.array([[9000.0, -9000.0, 1.0]]), jnp.float32(2.0))
    assert np.asarray(values, np.float32).tolist() == [[448.0, -448.0, 0.5]]
    assert scales.tolist() == [2.0]


def test_misfits_are_named() -> None:
    x, w = pair(0, 2, 64, 256)
    with pytest.raises(ValueError, match="kind must be one of"):
        quantise(w, "int3")
    with pytest.raises(ValueError, match="no multiple of 128"):
        quantise(w[:, :100], "int4")
    with pytest.raises(ValueError, match="does not fit"):
        quant_matmul(x[:, :128], quantise(w, "int8"))
    narrow = quantise(w, "fp8")
    with pytest.raises(ValueError, match="inputs are float32"):
        quant_matmul(x, narrow, backend="mosaic")
    with pytest.raises(ValueError, match="QuantConfig does not fit fp8"):
        quant_matmul(
            x.astype(jnp.bfloat16), narrow, config=QuantConfig(), interpret=mg.interpret_params()
        )
    with pytest.raises(ValueError, match="scales are for groups of 64"):
        quant_matmul(x.astype(jnp.bfloat16), quantise(w, "int8", 64), backend="mosaic")
