"""One random token a row from the softmax, after temperature, min-p, top-k and top-p; no sort.

With z = (logit - row maximum) / temperature in float32, each filter is a threshold on z: equal
values stay or go together. The best CANDIDATES tokens are found first. A row whose kept set lies
within them is drawn from them. A row without filters, or with a wide kept set, is drawn from the
whole vocabulary in two levels (masses of blocks, then inside one block); where top-k or top-p
reaches beyond the candidates, the threshold is found by bisection on the bits of z.

Which way a row goes depends on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxengine.sampling.blocks import pick, row_sum, running_sum, stride_of, strided_sums, top_k
from jaxengine.sampling.inputs import SamplingInputs
from jaxengine.sampling.keys import uniforms

CANDIDATES = 64
UNKEPT = 2**31 - 1  # bits of a token that no bound keeps


class _Rows(NamedTuple):
    """Per-row settings, [S] each; `k_on` and `p_on` say which filters the row has."""

    top: Array  # the row's largest logit
    scale: Array  # 1 / temperature
    least: Array  # min-p as a threshold on z; -inf = off
    top_k: Array
    top_p: Array
    k_on: Array
    p_on: Array
    edge: Array  # z of the last candidate


def _bits(z: Array) -> Array:
    """|z| as int32, in the same order: 0 for the best token, larger for less likely ones."""
    return lax.bitcast_convert_type(jnp.abs(z), jnp.int32)


def _bisect(
    bits: Array, weights: Array, target: Array, low: Array, on: Array, by_count: Array
) -> Array:
    """[R] the smallest bound with sum(weights where bits <= bound) >= target.

    `low` is a bound known to fall short. A token between the bounds weighs no less than one at
    the upper bound would: when less than that is between them, at most one token is left there
    and the search ends. `by_count`: the weights are 1, not exp(z).
    """

    def open_rows(low: Array, high: Array, below: Array, above: Array) -> Array:
        last = jnp.exp(-lax.bitcast_convert_type(high, jnp.float32))
        least = jnp.where(by_count, 1.0, last)
        return on & (high - low > 1) & (above - below >= 1.5 * least)

    def step(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        low, high, below, above = state
        middle = low + (high - low) // 2
        found = row_sum(jnp.where(bits <= middle[:, None], weights, 0.0))
        down = open_rows(*state) & (found >= target)
        up = open_rows(*state) & (found < target)
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, found, below),
            jnp.where(down, found, above),
        )

    high = jnp.where(weights > 0, bits, 0).max(-1)
    state = (low, high, jnp.zeros_like(target), row_sum(weights))
    bound: Array = lax.while_loop(lambda s: open_rows(*s).any(), step, state)[1]
    return bound


def _search(logits: Array, rows: _Rows) -> tuple[Array, Array]:
    """Thresholds on z [R] and block masses [R, n] of the tokens kept, of logits [R, V']."""
    z = (logits - rows.top[:, None]) * rows.scale[:, None]
    legal = (z >= rows.least[:, None]) & (z > -jnp.inf)
    bits = jnp.where(legal, _bits(z), UNKEPT)
    edge = _bits(rows.edge) - 1  # the tokens better than the last candidate are too few

    def narrow(phase: Array, mass: Array) -> Array:
        """Keep what top-k (phase 0), then top-p (phase 1) keeps; the rest gets mass 0."""
        by_count = phase == 0
        weights = jnp.where(by_count, jnp.where(mass > 0, 1.0, 0.0), mass)
        target = jnp.where(by_count, rows.top_k * 1.0, rows.top_p * row_sum(mass))
        on = jnp.where(by_count, rows.k_on, rows.p_on)
        # behind a top-k the top-p bound may lie among the candidates
        low = jnp.where(rows.k_on & ~by_count, -1, edge)
        bound = _bisect(bits, weights, target, low, on, by_count)
        return jnp.where(bits <= bound[:, None], mass, 0.0)

    mass = lax.fori_loop(0, 2, narrow, jnp.where(legal, jnp.exp(z), 0.0))
    return jnp.where(mass > 0, z, jnp.inf).min(-1), strided_sums(mass)


def _search_each(
    logits: Array, rows: _Rows, wanted: Array, least: Array, masses: Array
) -> tuple[Array, Array]:
    """`_search` for the wanted rows, one at a time: on a CPU one row stays in the cache."""
    order = jnp.argsort(~wanted, stable=True)

    def one(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        row = order[i]

        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, row, 1)

        threshold, mass = _search(cut(logits), jax.tree.map(cut, rows))
        return (
            lax.dynamic_update_slice_in_dim(found[0], threshold, row, 0),
            lax.dynamic_update_slice_in_dim(found[1], mass, row, 0),
        )

    found: tuple[Array, Array] = lax.fori_loop(0, wanted.sum(), one, (least, masses))
    return found


def draw(
    logits: Array, maxima: Array, inputs: SamplingInputs, sampling: Array, vocab: int
) -> Array:
    """[S] token ids for the `sampling` rows of padded logits [S, V']; others mean nothing.

    `maxima` is block_max(logits). A row must have a finite maximum.
    """
    count, width = logits.shape
    best = maxima.max(-1)
    best = jnp.where(jnp.isfinite(best), best, 0.0)  # bad rows: keep the arithmetic harmless
    scale = 1.0 / jnp.where(sampling, inputs.temperature, 1.0)
    k_on = sampling & (inputs.top_k > 0) & (inputs.top_k < vocab)
    p_on = sampling & (inputs.top_p < 1.0)
    least = jnp.where(inputs.min_p > 0, jnp.log(inputs.min_p), -jnp.inf)
    filtered = k_on | p_on | (sampling & (inputs.min_p > 0))
    uniform = uniforms(inputs.seed_lo, inputs.seed_hi, inputs.position)

    size = min(CANDIDATES, width)
    values, ids = lax.cond(
        filtered.any(),
        lambda: top_k(logits, maxima, size),
        lambda: (jnp.zeros((count, size)), jnp.zeros((count, size), jnp.int32)),
    )
    z = (values - best[:, None]) * scale[:, None]
    weight = jnp.exp(z)
    edge = z[:, -1]

    def holds_all(threshold: Array) -> Array:
        return jnp.asarray((edge < threshold) | (edge == -jnp.inf) | (size == width))

    # top-k and min-p among the candidates
    near = k_on & (inputs.top_k <= size)
    kth = jnp.take_along_axis(z, jnp.clip(inputs.top_k - 1, 0, size - 1)[:, None], 1)[:, 0]
    first = jnp.maximum(least, jnp.where(near, kth, -jnp.inf))
    inside = filtered & holds_all(first)
    kept = jnp.where(z >= first[:, None], weight, 0.0)

    def masses_of_all() -> Array:
        every = (logits - best[:, None]) * scale[:, None]
        return strided_sums(jnp.where(every >= least[:, None], jnp.exp(every), 0.0))

    blocks = width // stride_of(width)
    masses = lax.cond((sampling & ~inside).any(), masses_of_all, lambda: jnp.zeros((count, blocks)))

    # top-p among the candidates; behind a top-k only when that was settled there too
    sums = running_sum(kept)
    whole = jnp.where(inside, sums[:, -1], row_sum(masses))
    reached = sums >= (inputs.top_p * whole)[:, None]
    nucleus = jnp.where(reached, z, -jnp.inf).max(-1)
    second = jnp.maximum(first, jnp.where(p_on, nucleus, -jnp.inf))
    fits = filtered & (inside | ~k_on) & holds_all(second)
    place = pick(jnp.where(z >= second[:, None], kept, 0.0), uniform[:, 1])
    near_ids = jnp.take_along_axis(ids, place[:, None], 1)[:, 0]

    def from_vocabulary() -> Array:
        rows = _Rows(best, scale, least, inputs.top_k, inputs.top_p, k_on, p_on, edge)
        wanted = sampling & ~fits & (k_on | p_on)

        def search() -> tuple[Array, Array]:
            if jax.default_backend() == "cpu":
                return _search_each(logits, rows, wanted, least, masses)
            idle = rows._replace(k_on=k_on & wanted, p_on=p_on & wanted)
            threshold, mass = _search(logits, idle)
            return (
                jnp.where(wanted, threshold, least),
                jnp.where(wanted[:, None], mass, masses),
            )

        threshold, mass = lax.cond(wanted.any(), search, lambda: (least, masses))
        block = pick(mass, uniform[:, 0])
        member = block[:, None] + jnp.arange(width // blocks) * blocks
        value = jnp.take_along_axis(logits, member, 1, mode="promise_in_bounds")
        z = (value - best[:, None]) * scale[:, None]
        z = jnp.where(z >= threshold[:, None], z, -jnp.inf)
        top = jnp.maximum(z.max(-1, keepdims=True), -3e38)  # not -inf - -inf
        inner = pick(jnp.exp(z - top), uniform[:, 1])
        return inner * blocks + block

    far = sampling & ~fits
    far_ids = lax.cond(far.any(), from_vocabulary, lambda: jnp.zeros(count, jnp.int32))
    return jnp.where(fits, near_ids, far_ids)
