"""n-gram drafts on the device, where the newest tokens are known first."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxengine.runner.draft.verify import NO_DRAFT, known_tokens
from jaxengine.runner.forward import StepConfig, sections
from jaxengine.runner.state import SlotState
from jaxengine.sched.batch import Bucket
from jaxengine.sched.verify_batch import verify_layout


class Lookup(NamedTuple):
    """Lengths of the n-grams that the device looks up, in tokens."""

    low: int
    high: int


FROM_DRAFTER = Lookup(0, 0)  # nothing is looked up: the engine's drafter drafts


def look_up(
    config: StepConfig,
    bucket: Bucket,
    lookup: Lookup,
    slots: SlotState,
    length: Int[Array, "R"],
    blob: Int[Array, "B"],
) -> Int[Array, "S K"]:
    """The drafts of a step's rows (`jaxengine.sched.verify_batch`)."""
    part = sections(verify_layout(bucket, config.shape), blob)
    history = slots.history.at[part["slots"]].get(mode="fill", fill_value=0)
    return propose(history, known_tokens(part, length), bucket.drafts, lookup)


def propose(
    history: Int[Array, "S H"], length: Int[Array, "S"], k: int, lookup: Lookup
) -> Int[Array, "S K"]:
    """The tokens that followed the earliest occurrence of each row's longest repeated n-gram;
    NO_DRAFT where nothing did. As `jaxengine.speculate.ngram`."""
    rows, width = history.shape
    place = jnp.arange(width)
    alive = place < length[:, None]
    matched = jnp.zeros((rows, width), jnp.int32)
    for n in range(1, lookup.high + 1):
        token = jnp.take_along_axis(history, jnp.maximum(length - n, 0)[:, None], 1)
        before = jnp.pad(history, ((0, 0), (n, 0)), constant_values=-2)[:, :width]
        alive &= (before == token) & (length >= n)[:, None]
        matched += alive
    best = matched.max(1, keepdims=True)
    at = jnp.where(matched == best, place, width).min(1, keepdims=True)
    ahead = at + jnp.arange(k)
    tokens = jnp.take_along_axis(history, jnp.minimum(ahead, width - 1), 1)
    return jnp.where((best >= lookup.low) & (ahead < length[:, None]), tokens, NO_DRAFT)
