"""Sending tokens to the devices that hold their experts, and the results back.

Five steps, so that two microbatches can be run out of phase (see `overlap`):
`pack` -> `send` -> (experts) -> `give_back` -> `combine`. Each of `send` and `give_back` is one
collective, and nothing else. All run inside a shard_map; arrays are those of one device.

A token goes to a device at most once, with all its ids and weights, and comes back as one row:
the weighted sum over that device's experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxengine.parallel.cost import choose_exchange

BACKENDS = ("auto", "allgather", "all_to_all", "ragged")


@dataclass(frozen=True)
class ExpertShards:
    """Experts over the mesh axes `axis`, which together have `size` devices.

    Device r, counted over the axes in their order, holds experts (or, with copies of busy
    experts, slots) r * local .. (r + 1) * local - 1.
    """

    axis: tuple[str, ...]
    size: int
    local: int

    @property
    def total(self) -> int:
        return self.size * self.local


@dataclass(frozen=True)
class ExchangePlan:
    """What is known when compiling. `rows` are reserved in each direction for each pair of
    devices; fewer than `tokens` means that a second exchange may be needed (`left_over`)."""

    backend: str
    tokens: int
    top_k: int
    rows: int
    shards: ExpertShards


def make_plan(
    tokens: int,
    top_k: int,
    width: int,
    itemsize: int,
    shards: ExpertShards,
    backend: str = "auto",
    rows: int | None = None,
) -> ExchangePlan:
    """Choose the exchange of `tokens` tokens a device. `rows` limits "all_to_all"'s reservation.

    Raises ValueError for an unknown backend and for rows outside 1 .. tokens.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if rows is not None and not 1 <= rows <= max(tokens, 1):
        raise ValueError(f"rows must be from 1 to {tokens}, not {rows}")
    chosen, reserved = choose_exchange(tokens, top_k, width, itemsize, shards.total, shards.size)
    if backend == "auto":
        backend = chosen
    if backend != "all_to_all":
        return ExchangePlan(backend, tokens, top_k, tokens, shards)
    if rows is None:
        rows = reserved if chosen == "all_to_all" else tokens
    return ExchangePlan(backend, tokens, top_k, rows, shards)


class Packed(NamedTuple):
    """A device's rows to send, and what brings the answers back.

    `position` [size, t] is the row of token j's answer from device d; out of range where j has
    no expert there (all-gather: [0, 0]). `sizes` [size] counts rows by destination.
    """

    payload: Array
    position: Int[Array, "size t"]
    sizes: Int[Array, "size"]


class Received(NamedTuple):
    """Rows of all devices for this one's experts; unused rows have ids of -1.

    `ids` count from this device's first expert; others', like padding, are -1. `offsets` and
    `sizes` [size] (ragged only) say where each source's rows lie there, and how many came.
    """

    x: Float[Array, "R D"]
    ids: Int[Array, "R K"]
    weights: Float[Array, "R K"]
    offsets: Int[Array, "size"]
    sizes: Int[Array, "size"]


def _ones(word: jnp.dtype) -> int:
    """The unsigned word with all bits set: what an unused row is made of."""
    return int(2 ** (8 * word.itemsize) - 1)


def _to_words(x: Float[Array, "t D"], ids: Array, weights: Array) -> Array:
    """One row of unsigned words a token, so that one collective carries everything."""
    word = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
    extra = jnp.concatenate(
        [ids.astype(jnp.int32), lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)],
        axis=-1,
    )
    words = lax.bitcast_convert_type(extra, word).reshape(x.shape[0], -1)
    return jnp.concatenate([lax.bitcast_convert_type(x, word), words], axis=-1)


def _from_words(words: Array, width: int, top_k: int, dtype: jnp.dtype) -> tuple[Array, ...]:
    x = lax.bitcast_convert_type(words[:, :width], dtype)
    extra = words[:, width:].reshape(words.shape[0], 2 * top_k, -1)
    if words.dtype.itemsize == 4:
        extra = extra[..., 0]
    numbers = lax.bitcast_convert_type(extra, jnp.int32)
    return x, numbers[:, :top_k], lax.bitcast_convert_type(numbers[:, top_k:], jnp.float32)


def visits(plan: ExchangePlan, ids: Int[Array, "t K"]) -> Bool[Array, "size t"]:
    """Whether a token has an expert on a device; ids outside all experts have none."""
    s = plan.shards
    inside = (ids >= 0) & (ids < s.total)
    device = jnp.where(inside, ids // s.local, s.size)
    return (device[None] == jnp.arange(s.size, dtype=device.dtype)[:, None, None]).any(-1)


def pack(
    plan: ExchangePlan, x: Float[Array, "t D"], ids: Int[Array, "t K"], weights: Float[Array, "t K"]
) -> Packed:
    """Lay out the rows to send. Experts of no device are marked -1."""
    s, tokens = plan.shards, plan.tokens
    if x.shape[0] != tokens or ids.shape != (tokens, plan.top_k) or weights.shape != ids.shape:
        raise ValueError(
            f"x {x.shape}, ids {ids.shape} and weights {weights.shape} do not fit a plan for "
            f"{tokens} tokens with {plan.top_k} experts"
        )
    ids = jnp.where((ids >= 0) & (ids < s.total), ids, -1)
    words = _to_words(x, ids, weights)
    if plan.backend == "allgather":
        nothing = jnp.zeros((0,), jnp.int32)
        return Packed(words, jnp.zeros((0, 0), jnp.int32), nothing)
    wanted = visits(plan, ids)
    rank = jnp.cumsum(wanted.astype(jnp.int32), axis=1) - 1
    counts = rank[:, -1] + 1
    if plan.backend == "ragged":
        total = tokens * min(plan.top_k, s.size)
        base = jnp.cumsum(counts) - counts
    else:
        total = s.size * plan.rows
        base = jnp.arange(s.size, dtype=jnp.int32) * plan.rows
        wanted = wanted & (rank < plan.rows)
    position = jnp.where(wanted, base[:, None] + rank, total)
    tokens_at = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), position.shape)
    token = jnp.full((total,), tokens, jnp.int32).at[position].set(tokens_at, mode="drop")
    # Rows that nobody uses are all ones: their ids read as -1.
    payload = words.at[token].get(mode="fill", fill_value=_ones(words.dtype))
    return Packed(payload, position, counts)


def send(plan: ExchangePlan, packed: Packed) -> Received:
    """The dispatch collective. The result's rows are for `experts`; x's dtype is not known here,
    so `unpack` finishes it."""
    s = plan.shards
    nothing = jnp.zeros((0,), jnp.int32)
    none = jnp.zeros((0, 0), jnp.int32)
    if plan.backend == "allgather":
        rows = lax.all_gather(packed.payload, s.axis, tiled=True)
        return Received(rows, none, none, nothing, nothing)
    if plan.backend == "all_to_all":
        rows = lax.all_to_all(packed.payload, s.axis, 0, 0, tiled=True)
        return Received(rows, none, none, nothing, nothing)
    base = jnp.cumsum(packed.sizes) - packed.sizes
    sizes = _swap(packed.sizes, s)
    offsets = _swap(base, s)  # where, in each source, its rows for this device begin
    room = jnp.full(
        (s.size * plan.tokens, packed.payload.shape[1]),
        _ones(packed.payload.dtype),
        packed.payload.dtype,
    )
    mine = jnp.full((s.size,), lax.axis_index(s.axis) * plan.tokens, jnp.int32)
    rows = lax.ragged_all_to_all(
        packed.payload, room, base, packed.sizes, mine, sizes, axis_name=s.axis
    )
    return Received(rows, none, none, offsets, sizes)


def _swap(numbers: Int[Array, "size"], s: ExpertShards) -> Int[Array, "size"]:
    return lax.all_to_all(numbers, s.axis, 0, 0, tiled=True)


def unpack(plan: ExchangePlan, raw: Received, width: int, dtype: jnp.dtype) -> Received:
    """Rows as tokens again, with ids counted from this device's first expert."""
    s = plan.shards
    x, ids, weights = _from_words(raw.x, width, plan.top_k, dtype)
    local = ids - lax.axis_index(s.axis) * s.local
    here = (ids >= 0) & (local >= 0) & (local < s.local)
    used = (ids >= 0).any(-1, keepdims=True)
    x = jnp.where(used, x, jnp.zeros((), dtype))
    weights = jnp.where(here, weights, 0.0)
    return Received(x, jnp.where(here, local, -1), weights, raw.offsets, raw.sizes)


def give_back(plan: ExchangePlan, y: Float[Array, "R D"], received: Received) -> Array:
    """The collective that returns the experts' rows; all-gather's sums them on the way."""
    s = plan.shards
    if plan.backend == "allgather":
        return lax.psum_scatter(y, s.axis, tiled=True)
    if plan.backend == "all_to_all":
        return lax.all_to_all(y, s.axis, 0, 0, tiled=True)
    base = jnp.arange(s.size, dtype=jnp.int32) * plan.tokens
    room = jnp.zeros((plan.tokens * min(plan.top_k, s.size), y.shape[1]), y.dtype)
    back = _swap(received.sizes, s)  # what this device sent to each is what comes back
    return lax.ragged_all_to_all(
        y, room, base, received.sizes, received.offsets, back, axis_name=s.axis
    )


def combine(plan: ExchangePlan, returned: Array, packed: Packed) -> Float[Array, "t D"]:
    """Sum of each token's rows, in the devices' order, in float32; zero without any."""
    if plan.backend == "allgather":
        return returned
    if packed.position.size == 0:
        return jnp.zeros((plan.tokens, returned.shape[1]), returned.dtype)
    rows = returned.at[packed.position].get(mode="fill", fill_value=0)
    return rows.astype(jnp.float32).sum(0).astype(returned.dtype)


def left_over(plan: ExchangePlan, ids: Int[Array, "t K"]) -> tuple[Int[Array, "t K"], jax.Array]:
    """Ids that the reservation had no row for (others -1), and whether any device has such."""
    s = plan.shards
    wanted = visits(plan, ids)
    rank = jnp.cumsum(wanted.astype(jnp.int32), axis=1) - 1
    late = wanted & (rank >= plan.rows)  # [size, t]
    device = jnp.clip(ids // s.local, 0, s.size - 1)
    inside = (ids >= 0) & (ids < s.total)
    is_late = jnp.take_along_axis(late.T, device, axis=1) & inside
    found = lax.pmax(late.any().astype(jnp.int32), s.axis) > 0
    return jnp.where(is_late, ids, -1), found
