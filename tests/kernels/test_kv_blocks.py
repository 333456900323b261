"""kv_write and block_copy: XLA against NumPy, and the kernels in GPU interpret mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels.block_copy import gather_blocks, scatter_blocks
from jaxengine.pallas_kernels.kv_write.api import write_kv


def written(
    cache: np.ndarray, k: np.ndarray, v: np.ndarray, slots: np.ndarray, angle: np.ndarray | None
) -> np.ndarray:
    """float64 model of the write."""
    out = cache.astype(np.float64)
    page = cache.shape[3]
    for t, slot in enumerate(slots):
        if not 0 <= slot < cache.shape[0] * page:
            continue
        key = k[t].astype(np.float64)
        if angle is not None:
            a, b = np.split(key, 2, axis=-1)
            c, s = np.cos(angle[t]), np.sin(angle[t])
            key = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
        out[slot // page, 0, :, slot % page] = key
        out[slot // page, 1, :, slot % page] = v[t]
    return out


def inputs(tokens: int, heads: int, dim: int, page: int, seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    blocks = 6
    cache = rng.standard_normal((blocks, 2, heads, page, dim)).astype(np.float32)
    k, v = rng.standard_normal((2, tokens, heads, dim)).astype(np.float32)
    slots = rng.permutation(blocks * page)[:tokens].astype(np.int32)
    slots[::5] = blocks * page + 3  # padding
    slots[1::7] = -1
    return cache, k, v, slots, rng.uniform(0, 6, (tokens, dim // 2))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 99))
def test_write_is_float64s(tokens: int, heads: int, rotated: bool, seed: int) -> None:
    cache, k, v, slots, angle = inputs(tokens, heads, 64, 8, seed)
    turn = {"cos": jnp.cos(angle), "sin": jnp.sin(angle)} if rotated else {}
    got = write_kv(jnp.asarray(cache), jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots), **turn)
    want = written(cache, k, v, slots, angle if rotated else None)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_write_kernel_is_the_reference() -> None:
    cache, k, v, slots, angle = inputs(10, 2, 256, 16, 3)
    scales = jnp.array([[0.5, 2.0], [1.0, 0.25]], jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        args = (jnp.asarray(cache).astype(dtype), jnp.asarray(k), jnp.asarray(v))
        more: dict[str, Any] = {"cos": jnp.cos(angle), "sin": jnp.sin(angle), "kv_scales": scales}
        want = write_kv(*args, jnp.asarray(slots), backend="xla", **more)
        mg.reset_interpreter()
        got = write_kv(
            *args, jnp.asarray(slots), backend="mosaic", interpret=mg.interpret_params(True), **more
        )
        assert not mg.races_found()
        off = np.abs(np.asarray(got, np.float32) - np.asarray(want, np.float32))
        # Dividing and multiplying by the inverse may round a last bit apart.
        assert (off <= 0.13 * np.abs(np.asarray(want, np.float32)) + 1e-6).all()
        assert (off > 0).mean() < 0.01


def test_fp8_write_saturates() -> None:
    cache = jnp.zeros((1, 2, 1, 8, 64), jnp.float8_e4m3fn)
    big = jnp.full((1, 1, 64), 1e4, jnp.float32)
    got = write_kv(cache, big, -big, jnp.array([0]), kv_scales=jnp.ones((1, 2)))
    assert float(got[0, 0, 0, 0, 0]) == 448 and float(got[0, 1, 0, 0, 0]) == -448


def test_write_copies_no_cache() -> None:
    cache = jax.ShapeDtypeStruct((64, 2, 2, 16, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((8, 2, 64), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    program = jax.jit(write_kv, donate_argnums=0).lower(cache, kv, kv, slots).compile()
    memory = program.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes == 64 * 2 * 2 * 16 * 64 * 2


@pytest.mark.parametrize("mosaic", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_block_copy(mosaic: bool, gather: bool) -> None:
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((7, 2, 1, 16, 64)).astype(np.float32)
    ids = np.array([5, 0, 7, -1, 3], np.int32)
    blocks = rng.standard_normal((5, *cache.shape[1:])).astype(np.float32)
    how: dict[str, Any] = {"backend": "xla"}
    if mosaic:
        mg.reset_interpreter()
        how = {"backend": "mosaic", "num_ctas": 2, "interpret": mg.interpret_params(True)}
    if gather:
        want = np.zeros_like(blocks)
        for i, block in enumerate(ids):
            if 0 <= block < 7:
                want[i] = cache[block]
        got = gather_blocks(jnp.asarray(cache), jnp.asarray(ids), **how)
    else:
        want = cache.copy()
        for i, block in enumerate(ids):
            if 0 <= block < 7:
                want[block] = blocks[i]
        got = scatter_blocks(jnp.asarray(cache), jnp.asarray(ids), jnp.asarray(blocks), **how)
    np.testing.assert_array_equal(got, want)
    assert not (mosaic and mg.races_found())


def test_misfits_are_named() -> None:
    cache = jnp.zeros((2, 2, 1, 8, 64))
    k = jnp.zeros((3, 1, 64))
    with pytest.raises(ValueError, match="slots must be"):
        write_kv(cache, k, k, jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="cos and sin"):
        write_kv(cache, k, k, jnp.zeros(3, jnp.int32), cos=jnp.zeros((3, 32)))
    with pytest.raises(ValueError, match="does not fit"):
        write_kv(cache, jnp.zeros((3, 2, 64)), jnp.zeros((3, 2, 64)), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="blocks"):
        scatter_blocks(cache, jnp.zeros(1, jnp.int32), jnp.zeros((2, 2, 1, 8, 64)))
