"""Mixture-of-experts MLPs over experts that are spread over devices.

Everything runs inside a shard_map of the whole step. The results do not depend on how tokens are
distributed, up to the rounding of the last addition.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import device as kernel_device
from jaxengine.pallas_kernels.moe import moe_mlp
from jaxengine.parallel import exchange
from jaxengine.parallel.cost import sliced_is_faster
from jaxengine.parallel.exchange import ExchangePlan, ExpertShards, Packed, Received


class ExpertWeights(NamedTuple):
    """One device's experts; gate_up holds the gate's rows, then the up projection's."""

    gate_up: Float[Array, "El F2 D"]
    down: Float[Array, "El D F"]
    gate_up_bias: Float[Array, "El F2"] | None = None
    down_bias: Float[Array, "El D"] | None = None


class Replicas(NamedTuple):
    """Slots of each expert, as `eplb.place` gives them: the first `copies` of a row."""

    slots: Int[Array, "E R"]
    copies: Int[Array, "E"]


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """How the local experts are computed; see `pallas_kernels.moe.moe_mlp`."""

    activation: str = "silu"
    activation_limit: float = 7.0
    kernel_backend: str = "auto"


def to_slots(
    ids: Int[Array, "t K"], replicas: Replicas, first_token: Int[Array, ""] | int
) -> Int[Array, "t K"]:
    """Expert ids to slots: token n takes copy n mod copies, counting from `first_token`."""
    experts = replicas.copies.shape[0]
    inside = (ids >= 0) & (ids < experts)
    safe = jnp.where(inside, ids, 0)
    token = first_token + jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(inside, replicas.slots[safe, token % replicas.copies[safe]], -1)


def local_mlp(
    x: Float[Array, "R D"],
    ids: Int[Array, "R K"],
    weights: Float[Array, "R K"],
    experts: ExpertWeights,
    options: ExpertOptions,
) -> Float[Array, "R D"]:
    """This device's experts on rows whose ids count from its first; other ids add nothing."""
    if x.shape[0] == 0 or ids.shape[1] == 0:
        return jnp.zeros_like(x)
    how: dict[str, Any] = {"activation": options.activation, "backend": options.kernel_backend}
    if experts.gate_up_bias is not None:
        how["gate_up_bias"] = experts.gate_up_bias
    if experts.down_bias is not None:
        how["down_bias"] = experts.down_bias
    if options.activation == "clamped_swiglu":
        how["activation_limit"] = options.activation_limit
    return moe_mlp(x, experts.gate_up, experts.down, weights, ids, **how)


def wire_dtype(x: Array, experts: ExpertWeights) -> Any:
    """Where the Hopper kernels run, tokens travel and multiply in the weights' dtype."""
    fast = kernel_device.device_reason() == ""
    return experts.gate_up.dtype if fast and x.dtype == jnp.float32 else x.dtype


def dispatch(
    plan: ExchangePlan, x: Float[Array, "t D"], ids: Int[Array, "t K"], weights: Float[Array, "t K"]
) -> tuple[Packed, Received]:
    """Send tokens to their experts' devices."""
    packed = exchange.pack(plan, x, ids, weights)
    return packed, exchange.unpack(plan, exchange.send(plan, packed), x.shape[1], x.dtype)


def compute(
    received: Received, experts: ExpertWeights, options: ExpertOptions
) -> Float[Array, "R D"]:
    """The local experts' sum for each received row."""
    return local_mlp(received.x, received.ids, received.weights, experts, options)


def combine(
    plan: ExchangePlan, y: Float[Array, "R D"], packed: Packed, received: Received
) -> Float[Array, "t D"]:
    """Bring the rows back and add them up."""
    return exchange.combine(plan, exchange.give_back(plan, y, received), packed)


def add_left_over(
    plan: ExchangePlan,
    out: Float[Array, "t D"],
    x: Float[Array, "t D"],
    ids: Int[Array, "t K"],
    weights: Float[Array, "t K"],
    experts: ExpertWeights,
    options: ExpertOptions,
) -> Float[Array, "t D"]:
    """Serve what `plan.rows` had no room for, if any device has such: nothing is dropped.

    All devices take the same branch. Without a limit this is no operation.
    """
    if plan.rows >= plan.tokens or plan.backend != "all_to_all":
        return out
    late, found = exchange.left_over(plan, ids)
    whole = dataclasses.replace(plan, rows=plan.tokens)

    def again(so_far: Array) -> Array:
        packed, received = dispatch(whole, x, late, weights)
        more = combine(whole, compute(received, experts, options), packed, received)
        return (so_far.astype(jnp.float32) + more.astype(jnp.float32)).astype(so_far.dtype)

    return lax.cond(found, again, lambda so_far: so_far, out)


def expert_parallel_mlp(
    x: Float[Array, "t D"],
    ids: Int[Array, "t K"],
    weights: Float[Array, "t K"],
    experts: ExpertWeights,
    *,
    shards: ExpertShards,
    activation: str = "silu",
    activation_limit: float = 7.0,
    backend: str = "auto",
    kernel_backend: str = "auto",
    rows: int | None = None,
    replicas: Replicas | None = None,
) -> Float[Array, "t D"]:
    """Sum over each token's experts of weight * expert(x), for tokens that differ by device.

    `ids` are global; -1 marks a padding token, which is sent nowhere and gets 0. All devices
    must have the same number of tokens. Raises ValueError for shapes that do not fit `shards`
    and for an unknown backend.
    """
    _check(experts, shards)
    if x.shape[0] == 0 or ids.shape[1] == 0:
        return jnp.zeros_like(x)
    if replicas is not None:
        ids = to_slots(ids, replicas, lax.axis_index(shards.axis) * x.shape[0])
    options = ExpertOptions(activation, activation_limit, kernel_backend)
    wire = x.astype(wire_dtype(x, experts))
    tokens, top_k = ids.shape
    size = wire.dtype.itemsize
    plan = exchange.make_plan(tokens, top_k, x.shape[1], size, shards, backend, rows)
    packed, received = dispatch(plan, wire, ids, weights)
    out = combine(plan, compute(received, experts, options), packed, received)
    return add_left_over(plan, out, wire, ids, weights, experts, options).astype(x.dtype)


def replicated_expert_mlp(
    x: Float[Array, "T D"],
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    experts: ExpertWeights,
    *,
    shards: ExpertShards,
    activation: str = "silu",
    activation_limit: float = 7.0,
    backend: str = "auto",
    kernel_backend: str = "auto",
    replicas: Replicas | None = None,
) -> Float[Array, "T D"]:
    """The same for tokens that every device of `shards.axis` holds; so is the result.

    backend "psum": every device runs its experts on all tokens. "allgather", "all_to_all",
    "ragged": every device takes a share of the tokens to the experts, then all gather the results.
    "auto" takes the faster by the cost model.
    """
    _check(experts, shards)
    tokens, width = x.shape
    if tokens == 0 or ids.shape[1] == 0:
        return jnp.zeros_like(x)
    if replicas is not None:
        ids = to_slots(ids, replicas, 0)
    options = ExpertOptions(activation, activation_limit, kernel_backend)
    wire = x.astype(wire_dtype(x, experts))
    if backend == "auto" and not sliced_is_faster(
        tokens, ids.shape[1], width, wire.dtype.itemsize, shards.total, shards.size
    ):
        backend = "psum"
    if backend == "psum":
        first = lax.axis_index(shards.axis) * shards.local
        here = (ids >= first) & (ids < first + shards.local)
        y = local_mlp(wire, jnp.where(here, ids - first, -1), weights, experts, options)
        return lax.psum(y, shards.axis).astype(x.dtype)
    share = -(-tokens // shards.size)
    missing = share * shards.size - tokens
    start = lax.axis_index(shards.axis) * share

    def own(values: Array, fill: int) -> Array:
        padded = jnp.pad(values, ((0, missing), (0, 0)), constant_values=fill)
        return lax.dynamic_slice_in_dim(padded, start, share)

    y = expert_parallel_mlp(
        own(wire, 0), own(ids, -1), own(weights, 0), experts,
        shards=shards, activation=activation, activation_limit=activation_limit,
        backend=backend, kernel_backend=kernel_backend,
    )  # fmt: skip
    return lax.all_gather(y, shards.axis, tiled=True)[:tokens].astype(x.dtype)


def _check(experts: ExpertWeights, shards: ExpertShards) -> None:
    held = experts.gate_up.shape[0]
    if held != shards.local:
        raise ValueError(f"a device holds {held} experts, but the shards say {shards.local}")
