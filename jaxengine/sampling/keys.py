"""Random numbers as a pure function of (seed, position)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def fold_in(seed_lo: Array, seed_hi: Array, position: Array) -> tuple[Array, Array]:
    """The two uint32 words of jax.random.fold_in(key, position), for arrays of any one shape.

    Threefry-2x32 written out: it becomes one fused operation, where jax.random's loop becomes a
    dozen, each of which every step bucket would have to compile.
    """
    keys = [seed_hi.astype(jnp.uint32), seed_lo.astype(jnp.uint32)]
    keys.append(keys[0] ^ keys[1] ^ jnp.uint32(0x1BD11BDA))
    a = keys[0]  # the counter is (0, position)
    b = keys[1] + position.astype(jnp.uint32)
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            a = a + b
            b = (b << turn) | (b >> (32 - turn))
            b = a ^ b
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return a, b


def uniforms(seed_lo: Array, seed_hi: Array, position: Array) -> Array:
    """[S, 2] float32 in (0, 1], multiples of 2**-24, of int32 [S] each."""
    bits = jnp.stack(fold_in(seed_lo, seed_hi, position), -1)
    return ((bits >> 8) + 1).astype(jnp.float32) * jnp.float32(2.0**-24)
