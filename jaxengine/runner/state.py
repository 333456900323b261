"""The state that lives on the device between steps. Donated to every step; after a failed step it
is gone."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxengine.models.cache import cache_shapes
from jaxengine.models.decoder import KV
from jaxengine.models.spec import DecoderSpec
from jaxengine.parallel.layout import StepLayout
from jaxengine.sched.batch import BatchShape
from jaxengine.sched.slot_record import SlotShape


class SlotState(NamedTuple):
    """Per-slot records, R slots (`jaxengine.sched.slot_record` says what they hold)."""

    last_token: Int[Array, "R"]
    history: Int[Array, "R H"]
    edit_token: Int[Array, "R E"]
    edit_kind: Int[Array, "R E"]
    edit_value: Int[Array, "R E"]
    bad_prefix: Int[Array, "R B W"]
    bad_last: Int[Array, "R B"]
    allow_mask: Int[Array, "R V32"]


class Counted(NamedTuple):
    """State that engines that speculate keep in addition to the slots. `length` counts the tokens
    of rows with drafts; `feature` is the target's final hidden state at the position before the
    last token, for drafters that start from it."""

    length: Int[Array, "R"]
    feature: Float[Array, "R F"] | None = None


class DeviceState(NamedTuple):
    kv: KV
    slots: SlotState


def state_shapes(
    spec: DecoderSpec, batch: BatchShape, slot: SlotShape, kv_dtype: Any, layout: StepLayout
) -> DeviceState:
    """ShapeDtypeStructs of the whole state, of all shards (attention data parallelism) together."""
    shards = layout.data_size
    shapes = cache_shapes(spec, layout, shards * batch.num_blocks, batch.block_size)
    cache = tuple(jax.ShapeDtypeStruct(shape, kv_dtype) for shape in shapes)
    fields = {
        name: jax.ShapeDtypeStruct((shards * slot.num_slots, *dims), jnp.int32)
        for name, dims in slot.fields().items()
    }
    last = jax.ShapeDtypeStruct((shards * slot.num_slots,), jnp.int32)
    kv = tuple(cache for _ in range(spec.num_layers))
    return DeviceState(kv, SlotState(last_token=last, **fields))  # type: ignore[arg-type]


def new_state[T](shapes: T) -> T:
    """Zeroed arrays of these shapes, where the shapes' shardings say."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)


def counted_shapes(slots: SlotState, width: int | None) -> Counted:
    """ShapeDtypeStructs; `width` F of the features, None: there are none."""
    last = slots.last_token
    feature: Any = None
    if width is not None:
        feature = jax.ShapeDtypeStruct((*last.shape, width), jnp.float32, sharding=last.sharding)
    return Counted(last, feature)


def seed_slot(shape: SlotShape, slots: SlotState, blob: Int[Array, "n"]) -> SlotState:
    """Write one slot's record (`pack_slot`'s blob). `slots` is donated; a slot that does not
    exist changes nothing."""
    offset = 1
    exists = blob[0] < slots.last_token.shape[0]
    at = jnp.where(exists, blob[0], 0)
    changed = {}
    for name, dims in shape.fields().items():
        size = int(np.prod(dims))
        part = blob[offset : offset + size].reshape(1, *dims)
        field = getattr(slots, name)
        part = jnp.where(exists, part, jax.lax.dynamic_slice_in_dim(field, at, 1))
        changed[name] = jax.lax.dynamic_update_slice_in_dim(field, part, at, 0)
        offset += size
    return slots._replace(**changed)
