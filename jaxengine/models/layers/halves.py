"""Cutting a step's tokens in two microbatches inside its program.

The cut is at half of the real tokens, wherever that falls, inside a prompt too. Shapes are static:
each half has room for half of the bucket, and what is behind its real tokens is padding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxengine.models.layers.attention import AttentionPlan


def half_room(tokens: int) -> int:
    """Places of one half of a bucket."""
    return -(-tokens // 2)


def cut_of(num_tokens: Int[Array, ""]) -> Int[Array, ""]:
    """Real tokens of the first half: the larger one, so that padding gathers in the second."""
    return (num_tokens + 1) // 2


def split(x: Array, cut: Int[Array, ""], axis: int = 0) -> tuple[Array, Array]:
    """The halves' places along the token axis; the second starts at the cut."""
    room = half_room(x.shape[axis])
    spare = 2 * room - x.shape[axis]
    padded = jnp.pad(x, [(0, spare if i == axis else 0) for i in range(x.ndim)]) if spare else x
    first = jax.lax.slice_in_dim(padded, 0, room, axis=axis)
    return first, jax.lax.dynamic_slice_in_dim(padded, cut, room, axis=axis)


def join(first: Array, second: Array, cut: Int[Array, ""], tokens: int) -> Array:
    """The step's tokens in order; the second half overwrites the first's padding."""
    whole = jnp.concatenate([first, jnp.zeros_like(second)])
    return jax.lax.dynamic_update_slice_in_dim(whole, second, cut, 0)[:tokens]


def split_plan(plan: AttentionPlan, num_slots: int) -> tuple[AttentionPlan, AttentionPlan]:
    """What each half writes and reads. `num_slots` (N * P) is a KV slot that does not exist.

    The second half's tokens may read what the first writes: run them in order, layer by layer.
    """
    cut = cut_of(plan.num_tokens)
    positions = split(plan.positions, cut)
    room = positions[0].shape[0]
    kv_slot = split(plan.kv_slot, cut, axis=1)
    place = jnp.arange(room)
    counts = (cut, plan.num_tokens - cut)
    # Places behind a half's tokens write nowhere, each at an index of its own.
    slots = [
        jnp.where(place[None] < count, slot, num_slots + place[None])
        for slot, count in zip(kv_slot, counts, strict=True)
    ]
    starts = (jnp.minimum(plan.q_start, cut), jnp.maximum(plan.q_start - cut, 0))
    later = starts[1][1:] - starts[1][:-1]  # tokens of each row in the second half
    lengths = (plan.seq_len - later, plan.seq_len)
    decode = (jnp.minimum(plan.num_decode, cut), jnp.maximum(plan.num_decode - cut, 0))
    items: tuple[Any, Any] = (None, None) if plan.items is None else _split_items(plan.items, cut)
    first, second = (
        plan._replace(
            positions=positions[i],
            kv_slot=slots[i],
            seq_len=lengths[i],
            q_start=starts[i],
            num_tokens=counts[i],
            num_decode=decode[i],
            items=items[i],
            decode_row=None if i == 0 else cut,
        )
        for i in (0, 1)
    )
    return first, second


def _split_items(
    items: Int[Array, "I four"], cut: Int[Array, ""]
) -> tuple[Int[Array, "I four"], Int[Array, "I four"]]:
    """Work items (row, first token, position, count) of each half; none left: count 0 at 0."""
    row, first, position, count = items.T
    before = jnp.clip(cut - first, 0, count)
    own = jnp.where(before > 0, position, 0)
    left = jnp.stack([row, jnp.minimum(first, cut), own, before], axis=1)
    after = count - before
    moved = jnp.where(after > 0, position + before, 0)
    right = jnp.stack([row, jnp.maximum(first - cut, 0), moved, after], axis=1)
    return left, right
