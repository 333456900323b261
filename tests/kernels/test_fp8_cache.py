"""An fp8 cache in the XLA path: what is written saturates, what is read is the stored value."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxengine.pallas_kernels.kv_write import kv_write
from jaxengine.pallas_kernels.kv_write.api import write_kv
from jaxengine.pallas_kernels.paged_attention import decode_attention, prefill_attention

FP8 = jnp.float8_e4m3fn
ROWS, HEADS, KV_HEADS, WIDTH, BLOCK, BLOCKS = 2, 4, 2, 16, 4, 12
VALUES = [0.0, 1.0, -3.3, 447.0, 500.0, -1e6, 1e-3, 448.0]


def test_writes_round_and_saturate() -> None:
    new = np.tile(np.float32(VALUES), (3, 4))
    cache = kv_write(jnp.zeros((BLOCKS, BLOCK, 32), FP8), jnp.asarray(new), jnp.array([5, 0, 999]))
    wanted = np.clip(new[0], -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = np.asarray(cache, np.float32).reshape(-1, 32)
    np.testing.assert_array_equal(got[5], wanted)
    np.testing.assert_array_equal(got[0], wanted)
    assert np.isfinite(got).all() and np.count_nonzero(got.any(-1)) == 2

    heads = new[:, :16].reshape(3, 1, 16)
    pool = jnp.zeros((BLOCKS, 2, 1, BLOCK, 16), FP8)
    slots = jnp.array([5, 0, 999])
    pool = write_kv(pool, jnp.asarray(heads), jnp.asarray(heads), slots, backend="xla")
    np.testing.assert_array_equal(np.asarray(pool, np.float32)[1, :, 0, 1], [wanted[:16]] * 2)


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_attention_reads_what_is_stored(kv_heads: int) -> None:
    """The same as over a bfloat16 cache with the same values."""
    rng = np.random.default_rng(0)
    heads = 2 * kv_heads
    shape = (BLOCKS, BLOCK, kv_heads * WIDTH)
    k, v = (jnp.asarray(rng.normal(size=shape), FP8) for _ in range(2))
    table = jnp.asarray(rng.permutation(BLOCKS).reshape(ROWS, -1), jnp.int32)
    lengths = jnp.array([7, 22])
    q = jnp.asarray(rng.normal(size=(ROWS, heads, WIDTH)), jnp.float32)
    caches = [(k, v), (k.astype(jnp.bfloat16), v.astype(jnp.bfloat16))]
    rows = jnp.int32(ROWS)
    got, wanted = (
        decode_attention(q, *c, table, lengths, rows, num_kv_heads=kv_heads) for c in caches
    )
    np.testing.assert_array_equal(got, wanted)
    assert np.abs(wanted).max() > 0.1

    tokens = jnp.asarray(rng.normal(size=(8, heads, WIDTH)), jnp.float32)
    items = jnp.array([[0, 0, 2, 5], [1, 5, 19, 3]], jnp.int32)
    got, wanted = (
        prefill_attention(tokens, *c, table, items, jnp.int32(2), num_kv_heads=kv_heads)
        for c in caches
    )
    np.testing.assert_array_equal(got, wanted)
