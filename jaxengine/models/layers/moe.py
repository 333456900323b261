"""Mixture of experts: router, experts, shared experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.mlp import gated
from jaxengine.models.layers.parallel import first_only, reduce
from jaxengine.models.spec import DecoderSpec, MoeSpec
from jaxengine.pallas_kernels.moe import moe_mlp, route
from jaxengine.parallel.exchange import ExpertShards
from jaxengine.parallel.experts import (
    ExpertWeights,
    Replicas,
    expert_parallel_mlp,
    replicated_expert_mlp,
)
from jaxengine.parallel.layout import StepLayout


def moe(
    spec: DecoderSpec,
    p: dict[str, Any],
    x: Float[Array, "T D"],
    valid: Bool[Array, "T"],
    layout: StepLayout,
) -> Float[Array, "T D"]:
    """What the experts make of every token, float32; tokens that are not `valid` go to none.

    `spec` is the device's (`local_spec`), `p` the layer's leaves.
    """
    assert spec.moe is not None
    weights, ids = choose(spec.moe, p, x)
    ids = jnp.where(valid[:, None], ids, -1)
    shared = shared_experts(spec, p, x)
    if layout.expert_parallel:
        routed = _over_devices(spec.moe, p, x, weights, ids, layout)
        return routed if shared is None else routed + reduce(shared, layout)
    y = moe_mlp(
        x.astype(p["experts_gate_up"].dtype),
        p["experts_gate_up"],
        p["experts_down"],
        weights,
        ids,
        gate_up_bias=p.get("experts_gate_up_bias"),
        down_bias=first_only(p.get("experts_down_bias"), layout),
        activation=spec.moe.activation,
        activation_limit=spec.moe.activation_limit,
        backend="auto" if layout.cache == "head_major" else layout.attention_backend,
    ).astype(jnp.float32)
    return reduce(y if shared is None else y + shared, layout)


def choose(
    moe: MoeSpec, p: dict[str, Any], x: Float[Array, "T D"]
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Weights and ids of every token's experts.

    Logits are worked out in float32: a rounded logit may pick another expert.
    """
    logits = jax.lax.dot_general(
        x.astype(jnp.float32),
        p["router"].astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
    )
    if moe.router_bias:
        logits = logits + p["router_bias"].astype(jnp.float32)
    bias, groups = p.get("choice_bias"), moe.num_groups
    if groups > 1 and moe.group_score == "max":
        bias, groups = _closed_groups(moe, logits), 1
    return route(
        logits,
        moe.top_k,
        scoring=moe.scoring,
        renormalise=moe.renormalise,
        bias=bias,
        num_groups=groups,
        top_groups=moe.top_groups,
        scale=moe.scale,
    )


def _closed_groups(moe: MoeSpec, logits: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """-inf for experts outside the `top_groups` groups with the highest single logit, else 0."""
    tokens, experts = logits.shape
    best = logits.reshape(tokens, moe.num_groups, -1).max(-1)
    kept = jax.lax.top_k(best, moe.top_groups)[1]
    open_ = jax.nn.one_hot(kept, moe.num_groups, dtype=jnp.bool_).any(1)
    return jnp.repeat(jnp.where(open_, 0.0, -jnp.inf), experts // moe.num_groups, axis=1)


def shared_experts(
    spec: DecoderSpec, p: dict[str, Any], x: Float[Array, "T D"]
) -> Float[Array, "T D"] | None:
    """The shared experts' partial result on this device."""
    assert spec.moe is not None
    if not spec.moe.shared_ffn_size:
        return None
    y = linear(gated(linear(x, p["shared_gate_up"]), spec.activation), p["shared_down"])
    if spec.moe.shared_gate:
        y = y * jax.nn.sigmoid(linear(x, p["shared_gate"]))
    return y


def _over_devices(
    moe: MoeSpec,
    p: dict[str, Any],
    x: Float[Array, "T D"],
    weights: Float[Array, "T K"],
    ids: Int[Array, "T K"],
    layout: StepLayout,
) -> Float[Array, "T D"]:
    """Experts spread over the mesh. Tokens differ along the data axis and are the same along the
    tensor axis, where every device brings a share of them."""
    experts, shards = expert_weights(p), expert_shards(moe, layout)
    how: dict[str, Any] = {"shards": shards, "backend": layout.dispatch}
    how |= {"activation": moe.activation, "activation_limit": moe.activation_limit}
    how["replicas"] = replicas_of(p)
    wide = x.astype(jnp.float32)
    if not layout.data_axis:
        return replicated_expert_mlp(wide, ids, weights, experts, **how)
    if not layout.tensor_axis:
        return expert_parallel_mlp(wide, ids, weights, experts, **how)
    y = expert_parallel_mlp(
        own_share(wide, layout, 0),
        own_share(ids, layout, -1),
        own_share(weights, layout, 0),
        experts,
        **how,
    )
    return all_shares(y, layout, x.shape[0])


def expert_weights(p: dict[str, Any]) -> ExpertWeights:
    """A layer's experts on this device."""
    biases = (p.get("experts_gate_up_bias"), p.get("experts_down_bias"))
    return ExpertWeights(p["experts_gate_up"], p["experts_down"], *biases)


def replicas_of(p: dict[str, Any]) -> Replicas | None:
    """Where the copies of the layer's experts lie; None without copies."""
    return Replicas(p["expert_slots"], p["expert_copies"]) if "expert_slots" in p else None


def expert_shards(moe: MoeSpec, layout: StepLayout) -> ExpertShards:
    """All devices of the mesh, each with the `moe.num_experts` of the local spec."""
    axes = tuple(a for a in (layout.data_axis, layout.tensor_axis) if a)
    return ExpertShards(axes, layout.data_size * layout.tensor_size, moe.num_experts)


def own_share(values: Float[Array, "T X"], layout: StepLayout, fill: int) -> Float[Array, "t X"]:
    """The tokens that this device of the tensor axis, which holds all, takes to the experts."""
    if not layout.tensor_axis:
        return values
    share = -(-values.shape[0] // layout.tensor_size)
    missing = share * layout.tensor_size - values.shape[0]
    padded = jnp.pad(values, ((0, missing), (0, 0)), constant_values=fill)
    start = jax.lax.axis_index(layout.tensor_axis) * share
    return jax.lax.dynamic_slice_in_dim(padded, start, share)


def all_shares(y: Float[Array, "t D"], layout: StepLayout, tokens: int) -> Float[Array, "T D"]:
    """The results of `own_share`'s tokens, from all devices of the tensor axis."""
    if not layout.tensor_axis:
        return y
    return jax.lax.all_gather(y, layout.tensor_axis, tiled=True)[:tokens]
