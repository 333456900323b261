"""The device operations at the sizes of a model, with the bytes and FLOPs that each must take.

Counted is what any implementation has to read, write and multiply: operands and results once, a
product of [m, k] and [k, n] as 2 m n k FLOPs, of causal attention only the pairs that are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.quantize import quantize
from jaxengine.pallas_kernels import device
from jaxengine.pallas_kernels.block_copy import gather_blocks, scatter_blocks
from jaxengine.pallas_kernels.kv_write.api import write_kv
from jaxengine.pallas_kernels.kv_write.reference import kv_write
from jaxengine.pallas_kernels.mla_attention import mla_attention
from jaxengine.pallas_kernels.moe import moe_mlp
from jaxengine.pallas_kernels.paged_attention import decode_attention, prefill_attention
from jaxengine.pallas_kernels.paged_attention.api import paged_attention
from jaxengine.pallas_kernels.quant_matmul import quant_matmul, quantise


@dataclass(frozen=True)
class Sizes:
    """Of the operations: `rows` sequences with `context` tokens of KV each, prompts of `tokens`."""

    rows: int = 8
    context: int = 512
    tokens: int = 256
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    hidden: int = 576
    ffn: int = 1536
    experts: int = 8
    top_k: int = 2
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class KernelCase:
    """One implementation of an operation: `run(*args)` takes at least `flops` and moves at least
    `nbytes`; `donate` are the arguments it updates in place."""

    op: str
    implementation: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    flops: float
    nbytes: float
    donate: tuple[int, ...] = ()


def cases(sizes: Sizes) -> Iterator[KernelCase]:
    """All operations with all implementations that this device runs, made one at a time."""
    for make in OPS.values():
        yield from make(sizes)


def backends() -> list[str]:
    """XLA everywhere; the Mosaic kernels on a GPU that they are for."""
    return ["xla"] if device.device_reason() else ["xla", "mosaic"]


def _random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


def _tables(s: Sizes) -> tuple[int, jax.Array]:
    """Number of blocks, and every row's blocks in random order."""
    width = -(-s.context // s.block_size)
    blocks = s.rows * width
    order = np.random.default_rng(0).permutation(blocks).reshape(s.rows, width)
    return blocks, jnp.asarray(order, jnp.int32)


def decode(s: Sizes) -> Iterator[KernelCase]:
    """One new token a row over its context."""
    blocks, table = _tables(s)
    pairs = s.rows * s.context
    flops = 4 * pairs * s.heads * s.head_dim
    kv_bytes = 2 * pairs * s.kv_heads * s.head_dim * s.itemsize
    nbytes = kv_bytes + 2 * s.rows * s.heads * s.head_dim * s.itemsize
    q = _random((s.rows, s.heads, s.head_dim), s.dtype)
    lengths = jnp.full((s.rows,), s.context, jnp.int32)
    flat = (blocks, s.block_size, s.kv_heads * s.head_dim)

    def token_major(*a: Any) -> Any:
        return decode_attention(*a, num_kv_heads=s.kv_heads)

    args = (q, _random(flat, s.dtype, 1), _random(flat, s.dtype, 2), table, lengths)
    rows = jnp.int32(s.rows)
    yield KernelCase("decode", "xla, token-major", token_major, (*args, rows), flops, nbytes)
    cache = _random((blocks, 2, s.kv_heads, s.block_size, s.head_dim), s.dtype, 1)
    start = jnp.arange(s.rows + 1, dtype=jnp.int32)
    for name in backends():

        def head_major(*a: Any, name: str = name) -> Any:
            return paged_attention(*a, scale=s.head_dim**-0.5, backend=name)

        how = (q, cache, table, start, lengths)
        yield KernelCase("decode", f"{name}, head-major", head_major, how, flops, nbytes)


def prefill(s: Sizes) -> Iterator[KernelCase]:
    """A prompt's tokens over themselves."""
    width = -(-s.tokens // s.block_size)
    pairs = s.tokens * (s.tokens + 1) / 2
    flops = 4 * pairs * s.heads * s.head_dim
    per_token = (2 * s.kv_heads + 2 * s.heads) * s.head_dim * s.itemsize
    q = _random((s.tokens, s.heads, s.head_dim), s.dtype)
    cache = _random((width, 2, s.kv_heads, s.block_size, s.head_dim), s.dtype, 1)
    table = jnp.arange(width, dtype=jnp.int32)[None]
    ends = jnp.asarray([0, s.tokens], jnp.int32), jnp.asarray([s.tokens], jnp.int32)
    items = np.array([[0, at, at, min(128, s.tokens - at)] for at in range(0, s.tokens, 128)])
    flat = (width, s.block_size, s.kv_heads * s.head_dim)

    def token_major(*a: Any) -> Any:
        return prefill_attention(*a, num_kv_heads=s.kv_heads)

    args = (q, _random(flat, s.dtype, 1), _random(flat, s.dtype, 2), table)
    work = jnp.asarray(items, jnp.int32), jnp.int32(len(items))
    yield KernelCase(
        "prefill", "xla, token-major", token_major, (*args, *work), flops, s.tokens * per_token
    )
    for name in backends():

        def head_major(*a: Any, name: str = name) -> Any:
            return paged_attention(*a, scale=s.head_dim**-0.5, backend=name)

        yield KernelCase(
            "prefill", f"{name}, head-major", head_major, (q, cache, table, *ends), flops,
            s.tokens * per_token,
        )  # fmt: skip


def latent(s: Sizes) -> Iterator[KernelCase]:
    """Decode of multi-head latent attention: rows of 512 + 64 that all heads share."""
    blocks, table = _tables(s)
    pairs, wide, rope = s.rows * s.context, 512, 64
    flops = 2 * pairs * s.heads * (2 * wide + rope)
    nbytes = (pairs * (wide + rope) + s.rows * s.heads * (2 * wide + rope)) * s.itemsize
    q = _random((s.rows, s.heads, wide + rope), s.dtype)
    cache = _random((blocks, s.block_size, wide + rope), s.dtype, 1)
    start = jnp.arange(s.rows + 1, dtype=jnp.int32)
    lengths = jnp.full((s.rows,), s.context, jnp.int32)
    for name in backends():

        def run(*a: Any, name: str = name) -> Any:
            return mla_attention(*a, scale=0.05, backend=name)

        yield KernelCase("latent", name, run, (q, cache, table, start, lengths), flops, nbytes)


def write(s: Sizes) -> Iterator[KernelCase]:
    """New keys and values of a prompt into the cache, rotated on the way where heads come first."""
    blocks = -(-s.tokens // s.block_size) + 1
    slots = jnp.asarray(np.random.default_rng(0).permutation(s.tokens), jnp.int32)
    nbytes = 4 * s.tokens * s.kv_heads * s.head_dim * s.itemsize
    width = s.kv_heads * s.head_dim

    def token_major(k: Any, v: Any, new: Any, at: Any) -> Any:
        return kv_write(k, new, at), kv_write(v, new, at)

    pools = tuple(_random((blocks, s.block_size, width), s.dtype, i) for i in (1, 2))
    args = (*pools, _random((s.tokens, width), s.dtype), slots)
    yield KernelCase("write", "xla, token-major", token_major, args, 0, nbytes, (0, 1))
    new = _random((s.tokens, s.kv_heads, s.head_dim), s.dtype)
    angle = jnp.ones((s.tokens, s.head_dim // 2), jnp.float32)
    for name in backends():

        def head_major(cache: Any, k: Any, v: Any, at: Any, turn: Any, name: str = name) -> Any:
            return write_kv(cache, k, v, at, cos=turn, sin=turn, backend=name)

        cache = _random((blocks, 2, s.kv_heads, s.block_size, s.head_dim), s.dtype)
        yield KernelCase(
            "write", f"{name}, head-major", head_major, (cache, new, new, slots, angle), 0,
            nbytes + 4 * s.tokens * s.head_dim, (0,),
        )  # fmt: skip


def experts(s: Sizes) -> Iterator[KernelCase]:
    """Expert MLPs of `rows` tokens, routed at random."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.choice(s.experts, s.top_k, replace=False) for _ in range(s.rows)])
    used = len(set(ids.reshape(-1).tolist()))
    flops = 6 * s.rows * s.top_k * s.hidden * s.ffn
    nbytes = (3 * used * s.hidden * s.ffn + 2 * s.rows * s.hidden) * s.itemsize
    args = (
        _random((s.rows, s.hidden), s.dtype),
        _random((s.experts, 2 * s.ffn, s.hidden), s.dtype, 1),
        _random((s.experts, s.hidden, s.ffn), s.dtype, 2),
        jnp.full((s.rows, s.top_k), 1 / s.top_k, jnp.float32),
        jnp.asarray(ids, jnp.int32),
    )
    for name in backends():

        def run(*a: Any, name: str = name) -> Any:
            return moe_mlp(*a, backend=name)

        yield KernelCase("experts", name, run, args, flops, nbytes)


def matmul(s: Sizes) -> Iterator[KernelCase]:
    """A product of `rows` tokens with plain and quantised weights."""
    flops = 2 * s.rows * s.hidden * s.ffn
    moved = s.rows * (s.hidden + s.ffn) * s.itemsize
    x, w = _random((s.rows, s.hidden), s.dtype), _random((s.ffn, s.hidden), "float32", 1)

    weights = s.hidden * s.ffn
    yield KernelCase(
        "matmul", f"xla, {s.dtype}", linear, (x, w.astype(s.dtype)), flops,
        moved + weights * s.itemsize,
    )  # fmt: skip
    yield KernelCase(
        "matmul", "xla, int8 both", lambda x, *w: linear(x, w), (x, *jax.jit(quantize)(w)), flops,
        moved + weights + 4 * s.ffn,
    )  # fmt: skip
    for kind, size in (("int8", 1.0), ("int4", 0.5), ("fp8", 1.0)):
        if kind == "int4" and s.hidden % 128:
            continue
        packed = jax.jit(quantise, static_argnums=1)(w, kind)
        nbytes = moved + weights * size + packed.scale.nbytes
        for name in backends():

            def run(x: Any, w: Any, name: str = name) -> Any:
                return quant_matmul(x, w, backend=name)

            yield KernelCase("matmul", f"{name}, {kind}", run, (x, packed), flops, nbytes)


def copy(s: Sizes) -> Iterator[KernelCase]:
    """KV blocks out of the cache and into it, as between tiers."""
    count = max(1, s.context // s.block_size)
    shape = (2, s.kv_heads, s.block_size, s.head_dim)
    nbytes = 2 * count * int(np.prod(shape)) * s.itemsize
    ids = jnp.asarray(np.random.default_rng(0).permutation(2 * count)[:count], jnp.int32)
    for name in backends():

        def gather(c: Any, i: Any, name: str = name) -> Any:
            return gather_blocks(c, i, backend=name)

        def scatter(c: Any, i: Any, b: Any, name: str = name) -> Any:
            return scatter_blocks(c, i, b, backend=name)

        cache = _random((2 * count, *shape), s.dtype)
        yield KernelCase("gather", name, gather, (cache, ids), 0, nbytes)
        new = _random((count, *shape), s.dtype, 1)
        yield KernelCase("scatter", name, scatter, (cache, ids, new), 0, nbytes, (0,))


OPS: dict[str, Callable[[Sizes], Iterator[KernelCase]]] = {
    f.__name__: f for f in (decode, prefill, latent, write, experts, matmul, copy)
}
