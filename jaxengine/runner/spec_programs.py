"""The programs of engines that speculate, lowered for their shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxengine.models.decoder import KV
from jaxengine.models.spec import Params
from jaxengine.runner.draft.drafter import follow, follow_drafts, remember
from jaxengine.runner.draft.lookup import Lookup, look_up
from jaxengine.runner.draft.verify import Drafted, accept_rows, verify_forward
from jaxengine.runner.lowering import Shapes, ints
from jaxengine.runner.sampling_step import FIXED
from jaxengine.runner.state import Counted, SlotState
from jaxengine.sched.batch import Bucket, layout_of, rows_layout
from jaxengine.sched.verify_batch import verify_layout


def lower_lookup(of: Shapes, bucket: Bucket, lookup: Lookup) -> Any:
    """(slots, length, blob) -> drafts."""
    config, slots, data = of.config, of.state.slots, of.devices.data

    def run_lookup(slots: SlotState, length: Array, blob: Array) -> Array:
        return look_up(config, bucket, lookup, slots, length, blob)

    blob = ints(verify_layout(bucket, config.shape).size)
    return of.devices.lower(run_lookup, (slots, slots.last_token, blob), (data, data, data), data)


def lower_verify(of: Shapes, bucket: Bucket) -> Any:
    """(params, kv, slots, length, drafts, blob) -> (kv, drafted)."""
    config, slots, data = of.config, of.state.slots, of.devices.data

    def run_verify(
        params: Params, kv: KV, slots: SlotState, length: Array, drafts: Array, blob: Array
    ) -> tuple[KV, Drafted]:
        return verify_forward(config, bucket, params, kv, slots, length, drafts, blob)

    blob = ints(verify_layout(bucket, config.shape).size)
    drafts = ints(bucket.rows, bucket.drafts)
    return of.devices.lower(
        run_verify,
        (of.params, of.state.kv, slots, slots.last_token, drafts, blob),
        (of.specs.params, of.specs.kv, data, data, data, data),
        (of.specs.kv, data),
        donate=(1,),
    )


def lower_accept(of: Shapes, bucket: Bucket) -> Any:
    """(head, slots, counted, drafted, rows blob, mask) -> (slots, counted, output rows)."""
    config, slots, devices = of.config, of.state.slots, of.devices
    data = devices.data

    def run_accept(
        params: Params,
        slots: SlotState,
        counted: Counted,
        drafted: Drafted,
        blob: Array,
        mask: Array,
    ) -> tuple[SlotState, Counted, Array]:
        slots, counted, rows = accept_rows(
            config, bucket, params, slots, counted, drafted, blob, mask
        )
        return slots, counted, devices.fetched(rows)

    mask = ints(bucket.tokens, -(-config.spec.vocab_size // 32))
    blob = ints(rows_layout(bucket.rows).size)
    return devices.lower(
        run_accept,
        (of.head, slots, of.counted, _drafted(of, bucket), blob, mask),
        (of.head_specs, data, data, data, data, data),
        (data, data, devices.fetch),
        donate=(1, 2),
    )


def lower_draft(of: Shapes, bucket: Bucket) -> Any:
    """(drafter's params, its kv, slots, counted, blob) -> (kv, drafts)."""
    drafter = of.drafter
    assert drafter is not None

    def run_draft(
        params: Any, kv: KV, slots: SlotState, counted: Counted, blob: Array
    ) -> tuple[KV, Array]:
        return drafter.draft(bucket, params, kv, slots, counted, blob)

    blob = ints(verify_layout(bucket, of.config.shape).size)
    args = (drafter.params, drafter.kv, of.state.slots, of.counted, blob)
    return jax.jit(run_draft, donate_argnums=(1,)).lower(*args)


def lower_follow(of: Shapes, bucket: Bucket) -> Any:
    """(drafter's params, its kv, history, hidden or None, blob) -> kv; of a step with drafts
    (params, kv, drafted, output rows, blob) -> kv."""
    config, drafter = of.config, of.drafter
    assert drafter is not None
    args: tuple[Any, ...]

    def run_follow_drafts(params: Any, kv: KV, drafted: Drafted, rows: Array, blob: Array) -> KV:
        return follow_drafts(config, bucket, drafter, params, kv, drafted, rows, blob)

    def run_follow(params: Any, kv: KV, history: Array, hidden: Array | None, blob: Array) -> KV:
        return follow(config, bucket, drafter, params, kv, history, hidden, blob)

    if bucket.drafts:
        columns = FIXED + 2 * (1 + config.num_logprobs)
        rows = ints(bucket.rows, 1 + (1 + bucket.drafts) * columns)
        blob = ints(verify_layout(bucket, config.shape).size)
        args = (drafter.params, drafter.kv, _drafted(of, bucket), rows, blob)
        return jax.jit(run_follow_drafts, donate_argnums=(1,)).lower(*args)
    hidden = None
    if drafter.reads_hidden:
        hidden = jax.ShapeDtypeStruct((bucket.tokens, config.width), jnp.float32)
    blob = ints(layout_of(bucket, config.shape).size)
    args = (drafter.params, drafter.kv, of.state.slots.history, hidden, blob)
    return jax.jit(run_follow, donate_argnums=(1,)).lower(*args)


def lower_remember(of: Shapes, rows: int) -> Any:
    """(feature, hidden, rows blob) -> feature."""

    def run_remember(feature: Array, hidden: Array, blob: Array) -> Array:
        return remember(rows, feature, of.config.features(hidden), blob)

    hidden = jax.ShapeDtypeStruct((rows, of.config.width), jnp.float32)
    args = (of.counted.feature, hidden, ints(rows_layout(rows).size))
    return jax.jit(run_remember, donate_argnums=(0,)).lower(*args)


def _drafted(of: Shapes, bucket: Bucket) -> Drafted:
    hidden = jax.ShapeDtypeStruct((bucket.tokens, of.config.width), jnp.float32)
    shapes: Any = (hidden, ints(bucket.rows, bucket.drafts), ints(bucket.rows))
    return Drafted(*shapes)
