import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.sampling import blocks, keys


@pytest.mark.parametrize("vocab", [5, 64, 320, 1000])
def test_argmax_takes_the_first_of_equals(vocab):
    x = np.random.default_rng(0).integers(0, 4, (8, vocab)).astype(np.float32)
    x[0] = -np.inf
    padded = blocks.pad_vocab(jnp.asarray(x))
    got = blocks.argmax(padded, blocks.block_max(padded))
    assert got.tolist() == x.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [40, 320, 6400])
@pytest.mark.parametrize("k", [1, 20, 64])
def test_top_k_is_exact_and_ordered_by_index_at_ties(vocab, k):
    k = min(k, vocab)
    x = np.random.default_rng(1).integers(0, 300, (4, vocab)).astype(np.float32)
    padded = blocks.pad_vocab(jnp.asarray(x))
    values, ids = blocks.top_k(padded, blocks.block_max(padded), k)
    want = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    assert ids.tolist() == want.tolist()
    assert values.tolist() == np.take_along_axis(x, want, 1).tolist()


def test_a_nan_shows_in_its_block_only():
    x = np.zeros((2, 192), np.float32)
    x[1, 70] = np.nan
    assert np.isnan(blocks.block_max(jnp.asarray(x))).tolist() == [
        [False] * 3,
        [False, True, False],
    ]


@pytest.mark.parametrize("width", [64, 128, 320, 1152])
def test_strided_sums(width):
    x = np.random.default_rng(2).normal(size=(3, width)).astype(np.float32)
    stride = blocks.stride_of(width)
    want = x.astype(np.float64).reshape(3, stride, -1).sum(1)
    np.testing.assert_allclose(blocks.strided_sums(jnp.asarray(x)), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(blocks.row_sum(jnp.asarray(x)), want.sum(-1), rtol=1e-4, atol=1e-4)


pick = jax.jit(blocks.pick)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1), st.sampled_from([2.0**-24, 0.25, 0.5, 1.0 - 2.0**-24, 1.0]))
def test_pick_never_takes_weight_zero(seed, uniform):
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(size=(4, 200)) * 8).astype(np.float32)
    weights[rng.random((4, 200)) < 0.9] = 0
    weights[:, rng.integers(0, 200)] = 1e-30
    chosen = np.asarray(pick(weights, np.full(4, uniform, np.float32)))
    assert (np.take_along_axis(weights, chosen[:, None], 1) > 0).all()


def test_keys_are_jax_fold_in():
    seeds = [(0, 0), (1, 0), (-1, -1), (123456789, -7)]
    positions = [0, 1, 4096, 2**31 - 1]
    lo = np.array([s[0] for s in seeds], np.int32)
    hi = np.array([s[1] for s in seeds], np.int32)
    a, b = keys.fold_in(jnp.asarray(lo), jnp.asarray(hi), jnp.asarray(positions, jnp.int32))
    for i, position in enumerate(positions):
        data = jnp.asarray([hi[i], lo[i]]).astype(jnp.uint32)
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        want = jax.random.key_data(jax.random.fold_in(key, position))
        assert [int(a[i]), int(b[i])] == want.tolist()


def test_uniforms_are_in_the_half_open_interval():
    position = jnp.arange(20000, dtype=jnp.int32)
    zeros = jnp.zeros_like(position)
    u = np.asarray(keys.uniforms(zeros + 5, zeros, position))
    assert u.min() > 0 and u.max() <= 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(np.corrcoef(u.T)[0, 1]) < 0.03
