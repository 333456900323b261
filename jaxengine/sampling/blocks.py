"""Two-level reductions over the vocabulary.

XLA:CPU runs a plain max or sum at memory speed, but argmax, top_k, sort and any reduction fused
with other work ten times slower. So the vocabulary is cut in blocks: one cheap pass over all of
it, then the slow operation on the few blocks that matter. Every function treats rows alone: a
row's result does not depend on the number of rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 64  # width of the contiguous blocks of argmax and top_k


def pad_vocab(logits: Array) -> Array:
    """[S, V] -> [S, V'], V' the next multiple of BLOCK, filled with -inf."""
    extra = -logits.shape[1] % BLOCK
    return jnp.pad(logits, ((0, 0), (0, extra)), constant_values=-jnp.inf) if extra else logits


def block_max(x: Array) -> Array:
    """[S, V'] -> [S, V' / BLOCK]; a NaN in the block makes its maximum NaN."""
    return x.reshape(x.shape[0], -1, BLOCK).max(-1)


def _first(mask: Array) -> Array:
    """[S, n] bool -> [S] index of the first True (n when there is none)."""
    return jnp.where(mask, jnp.arange(mask.shape[1]), mask.shape[1]).min(-1)


def argmax(x: Array, maxima: Array) -> Array:
    """[S] first index of the row's maximum; `maxima` is block_max(x)."""
    rows, blocks = maxima.shape
    top = maxima.max(-1, keepdims=True)
    block = jnp.minimum(_first(maxima == top), blocks - 1)
    flat = x.reshape(rows * blocks, BLOCK)
    inside = flat.at[jnp.arange(rows) * blocks + block].get(mode="promise_in_bounds")
    return block * BLOCK + jnp.minimum(_first(inside == top), BLOCK - 1)


def top_k(x: Array, maxima: Array, k: int) -> tuple[Array, Array]:
    """The k largest of each row and their indices, [S, k], best first, ties by lower index.

    Exact: the k largest lie in the k blocks with the largest maxima.
    """
    rows, blocks = maxima.shape
    if blocks <= k or rows * blocks * BLOCK >= 2**31:
        values, where = lax.top_k(x, k)
        return values, where
    _, chosen = lax.top_k(maxima, k)
    chosen = jnp.sort(chosen, -1)  # keeps ties in order of index
    flat = x.reshape(rows * blocks, BLOCK)
    index = (jnp.arange(rows)[:, None] * blocks + chosen).reshape(-1)
    inside = flat.at[index].get(mode="promise_in_bounds").reshape(rows, k * BLOCK)
    values, where = lax.top_k(inside, k)
    block = jnp.take_along_axis(chosen, where // BLOCK, 1, mode="promise_in_bounds")
    return values, block * BLOCK + where % BLOCK


def stride_of(width: int) -> int:
    """Elements in a strided block: block j of n is {j, j + n, j + 2n, ...}."""
    return next(r for r in (256, 128, 64) if width % r == 0)


def strided_sums(x: Array) -> Array:
    """[S, V'] -> [S, n] sums of the strided blocks."""
    parts = stride_of(x.shape[1])
    # The barrier keeps what makes x out of the reduction.
    return lax.optimization_barrier(x).reshape(x.shape[0], parts, -1).sum(1)


def row_sum(x: Array) -> Array:
    """[S, n] -> [S]."""
    return lax.optimization_barrier(x).sum(-1)


def running_sum(x: Array) -> Array:
    """[S, n] -> [S, n] cumulative sums of short rows, as one small product (XLA:CPU's cumsum
    compiles to a chain of window reductions)."""
    lower = jnp.tri(x.shape[1], dtype=x.dtype)
    return lax.dot_general(x, lower, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def pick(weights: Array, uniform: Array) -> Array:
    """Inverse CDF: [S] index drawn in proportion to `weights` [S, n] by `uniform` [S] in (0, 1].

    Never an index of weight 0, whatever the rounding of the cumulative sum.
    """
    count = weights.shape[1]
    sums = running_sum(weights)
    target = uniform * sums[:, -1]
    positive = weights > 0
    first = _first(positive & (sums >= target[:, None]))
    last = jnp.where(positive, jnp.arange(count), 0).max(-1)
    return jnp.where(first < count, first, last)
