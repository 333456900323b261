"""An expert layer in the six steps that two microbatches take in turn (`parallel.overlap`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxengine.models.layers.moe import (
    all_shares,
    choose,
    expert_shards,
    expert_weights,
    own_share,
    replicas_of,
    shared_experts,
)
from jaxengine.models.layers.parallel import reduce
from jaxengine.models.spec import DecoderSpec
from jaxengine.parallel import exchange
from jaxengine.parallel.experts import ExpertOptions, compute, to_slots, wire_dtype
from jaxengine.parallel.layout import StepLayout
from jaxengine.parallel.overlap import ExpertLayer

Norm = Callable[[Array], Array]
Residual = Callable[[Array, Array], Array]  # (x, what the layer adds) -> x


class Half(NamedTuple):
    """A microbatch on its way through the layers; `valid` marks its real tokens."""

    x: Float[Array, "t D"]
    valid: Bool[Array, "t"]


class Kept(NamedTuple):
    """What the layer keeps of a half while its tokens are with the experts."""

    half: Half
    normed: Float[Array, "t D"]
    plan: exchange.ExchangePlan
    packed: exchange.Packed
    wire: Any  # dtype on the way


def expert_layer(
    spec: DecoderSpec,
    layout: StepLayout,
    p: dict[str, Any],
    attend: Callable[[int, Half, Any], tuple[Half, Any]],
    norm: Norm,
    add: Residual,
    seen: Callable[[Array], None] | None = None,
) -> ExpertLayer:
    """`spec` is the device's, `p` the layer's leaves.

    `attend` is the attention block of a half with its residual, `norm` what precedes the experts
    and `add` the residual sum. `seen` gets the experts' ids of a half's tokens [t, K], -1 where
    there is no token. An exchange has room for all tokens: there is no second round.
    """
    moe = spec.moe
    assert moe is not None
    shards, held = expert_shards(moe, layout), expert_weights(p)
    replicas = replicas_of(p)
    options = ExpertOptions(moe.activation, moe.activation_limit)

    def pack(half: Half) -> tuple[Kept, Array]:
        normed = norm(half.x)
        weights, ids = choose(moe, p, normed)
        ids = jnp.where(half.valid[:, None], ids, -1)
        if seen is not None:
            seen(ids)
        if replicas is not None:
            ids = to_slots(ids, replicas, 0)
        wire = normed.astype(wire_dtype(normed, held))
        own = [own_share(a, layout, fill) for a, fill in ((wire, 0), (ids, -1), (weights, 0))]
        tokens, width = own[0].shape
        plan = exchange.make_plan(
            tokens, moe.top_k, width, wire.dtype.itemsize, shards, layout.dispatch, tokens
        )
        packed = exchange.pack(plan, *own)
        return Kept(half, normed, plan, packed, wire.dtype), packed.payload

    def send(kept: Kept, payload: Array) -> exchange.Received:
        return exchange.send(kept.plan, kept.packed._replace(payload=payload))

    def experts(kept: Kept, came: exchange.Received) -> tuple[Any, ...]:
        width = kept.normed.shape[1]
        received = exchange.unpack(kept.plan, came, width, kept.wire)
        shared = shared_experts(spec, p, kept.normed)
        return compute(received, held, options), received, shared

    def give_back(kept: Kept, rows: tuple[Any, ...]) -> tuple[Array, Array | None]:
        y, received, shared = rows
        return exchange.give_back(kept.plan, y, received), shared

    def after(kept: Kept, back: tuple[Array, Array | None]) -> Half:
        returned, shared = back
        y = exchange.combine(kept.plan, returned, kept.packed)
        y = all_shares(y, layout, kept.normed.shape[0]).astype(jnp.float32)
        if shared is not None:
            y = y + reduce(shared, layout)
        return kept.half._replace(x=add(kept.half.x, y))

    return ExpertLayer(attend, pack, send, experts, give_back, after)
