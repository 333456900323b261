"""The parameter tree: every leaf's shape, how devices share it, and how shares are laid out.

A leaf joined of several parts (q, k, v; gate and up) is stored shard by shard under tensor
parallelism, [q_0; k_0; v_0; q_1; ...], so that a plain split gives every device its own joined
part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.parallel.layout import StepLayout

if TYPE_CHECKING:  # the loader needs no JAX
    import jax
    from jax.sharding import PartitionSpec


class Leaf(NamedTuple):
    """`split`: the axis that tensor parallelism divides, None = every device has all of it.

    `parts`: what is joined along that axis, as (units, rows of a unit): units are heads or
    columns, which stay whole. `experts`: axis 0 counts experts. `wide`: kept in float32.
    `padded`: rows of zeros are added where it does not divide.
    """

    shape: tuple[int, ...]
    split: int | None = None
    parts: tuple[tuple[int, int], ...] = ()
    experts: bool = False
    wide: bool = False
    padded: bool = False
    table: bool = False  # int32


def top_leaves(spec: DecoderSpec) -> dict[str, Leaf]:
    """Leaves outside of layers."""
    table = Leaf((spec.vocab_size, spec.hidden_size), 0, padded=True)
    leaves = {"embed": table, "final_norm": Leaf((spec.hidden_size,))}
    return leaves if spec.tie_embeddings else {**leaves, "head": table}


def layer_leaves(spec: DecoderSpec, layer: int) -> dict[str, Leaf]:
    """Leaves of one layer."""
    norm = Leaf((spec.hidden_size,))
    leaves = {"attn_norm": norm, "mlp_norm": norm} if spec.pre_norm else {}
    leaves |= _latent_attention(spec) if spec.mla is not None else _attention(spec)
    leaves |= _experts(spec) if spec.is_moe(layer) else _mlp(spec)
    if spec.post_norm:
        leaves |= {"attn_post_norm": norm, "mlp_post_norm": norm}
    return leaves


def _attention(spec: DecoderSpec) -> dict[str, Leaf]:
    heads, kv_heads, dim, width = (
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.hidden_size,
    )
    rows, parts = (heads + 2 * kv_heads) * dim, ((heads, dim), (kv_heads, dim), (kv_heads, dim))
    leaves = {"qkv": Leaf((rows, width), 0, parts), "o": Leaf((width, heads * dim), 1)}
    if spec.qkv_bias:
        leaves["qkv_bias"] = Leaf((rows,), 0, parts)
    if spec.o_bias:
        leaves["o_bias"] = Leaf((width,))
    if spec.qk_norm:
        leaves |= {"q_norm": Leaf((dim,)), "k_norm": Leaf((dim,))}
    if spec.qk_norm_wide:
        leaves["q_norm"] = Leaf((heads * dim,), 0)
        leaves["k_norm"] = Leaf((kv_heads * dim,), 0, ((kv_heads, dim),))
    if spec.sinks:
        leaves["sinks"] = Leaf((heads,), 0)
    return leaves


def _latent_attention(spec: DecoderSpec) -> dict[str, Leaf]:
    mla, heads, width = spec.mla, spec.num_heads, spec.hidden_size
    assert mla is not None
    query = heads * (mla.nope_dim + mla.rope_dim)
    leaves = {
        "kv_a": Leaf((mla.width, width)),
        "kv_a_norm": Leaf((mla.latent,)),
        "kv_b": Leaf((heads * (mla.nope_dim + mla.value_dim), mla.latent), 0),
        "o": Leaf((width, heads * mla.value_dim), 1),
    }
    if not mla.q_rank:
        return {**leaves, "q": Leaf((query, width), 0)}
    leaves |= {"q_a": Leaf((mla.q_rank, width)), "q_a_norm": Leaf((mla.q_rank,))}
    return {**leaves, "q_b": Leaf((query, mla.q_rank), 0)}


def _mlp(spec: DecoderSpec) -> dict[str, Leaf]:
    width, ffn = spec.hidden_size, spec.ffn_size
    parts = ((ffn, 1), (ffn, 1))
    leaves = {"gate_up": Leaf((2 * ffn, width), 0, parts), "down": Leaf((width, ffn), 1)}
    if spec.mlp_bias:
        leaves |= {"gate_up_bias": Leaf((2 * ffn,), 0, parts), "down_bias": Leaf((width,))}
    return leaves


def _experts(spec: DecoderSpec) -> dict[str, Leaf]:
    moe, width = spec.moe, spec.hidden_size
    assert moe is not None
    experts, ffn, shared = moe.num_experts, moe.ffn_size, moe.shared_ffn_size
    parts, slots = ((ffn, 1), (ffn, 1)), experts + moe.redundant
    leaves = {
        "router": Leaf((experts, width)),
        "experts_gate_up": Leaf((slots, 2 * ffn, width), 1, parts, experts=True),
        "experts_down": Leaf((slots, width, ffn), 2, experts=True),
    }
    if moe.placed:  # slots of every expert, see parallel.eplb
        leaves["expert_slots"] = Leaf((experts, moe.most_copies), table=True)
        leaves["expert_copies"] = Leaf((experts,), table=True)
    if moe.router_bias:
        leaves["router_bias"] = Leaf((experts,))
    if moe.choice_bias:
        leaves["choice_bias"] = Leaf((experts,), wide=True)
    if moe.expert_bias:
        leaves["experts_gate_up_bias"] = Leaf((slots, 2 * ffn), 1, parts, experts=True)
        leaves["experts_down_bias"] = Leaf((slots, width), experts=True)
    if shared:
        leaves["shared_gate_up"] = Leaf((2 * shared, width), 0, ((shared, 1), (shared, 1)))
        leaves["shared_down"] = Leaf((width, shared), 1)
    if moe.shared_gate:
        leaves["shared_gate"] = Leaf((1, width))
    return leaves


def leaf_of(spec: DecoderSpec, name: str) -> Leaf:
    """A leaf by its name. Raises KeyError for one that the model does not have."""
    if name in (top := top_leaves(spec)):
        return top[name]
    for layer in _representatives(spec):
        if name in (leaves := layer_leaves(spec, layer)):
            return leaves[name]
    raise KeyError(name)


def leaf_shape(spec: DecoderSpec, leaf: str) -> tuple[int, ...]:
    """Shape of a leaf by its name."""
    return leaf_of(spec, leaf).shape


def _representatives(spec: DecoderSpec) -> list[int]:
    """One layer of each kind: with a plain MLP, with experts."""
    kinds = {spec.is_moe(i): i for i in reversed(range(spec.num_layers))}
    return sorted(kinds.values())


def param_shapes(spec: DecoderSpec, dtype: Any, tensor_size: int = 1) -> Params:
    """The parameter tree's shapes, as jax.ShapeDtypeStruct: programs compile while weights load.

    `tensor_size` > 1: as `arrange` lays them out, with replicated kv heads counted.
    """

    import jax
    import jax.numpy as jnp

    def struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
        kind = jnp.int32 if leaf.table else jnp.float32 if leaf.wide else dtype
        return jax.ShapeDtypeStruct(arranged_shape(leaf, tensor_size), kind)

    return _tree(spec, struct)


def param_specs(spec: DecoderSpec, layout: StepLayout) -> Params:
    """The tree with a PartitionSpec for each leaf: which mesh axes divide which axis.

    Under expert parallelism the experts' first axis is divided over data and tensor axes
    together (in this order), otherwise their columns over the tensor axis.
    """
    from jax.sharding import PartitionSpec

    axes = tuple(a for a in (layout.data_axis, layout.tensor_axis) if a)

    def split(leaf: Leaf) -> PartitionSpec:
        if leaf.experts and layout.expert_parallel:
            return PartitionSpec(axes)
        if leaf.split is None or not layout.tensor_axis:
            return PartitionSpec()
        return PartitionSpec(*[None] * leaf.split, layout.tensor_axis)

    return _tree(spec, split)


def _tree(spec: DecoderSpec, make: Any) -> Params:
    tree: Params = {name: make(leaf) for name, leaf in top_leaves(spec).items()}
    tree["layers"] = [
        {name: make(leaf) for name, leaf in layer_leaves(spec, i).items()}
        for i in range(spec.num_layers)
    ]
    return tree


def count_params(spec: DecoderSpec) -> tuple[int, int]:
    """Numbers of parameters: all, and those that one token uses (its share of the experts)."""
    total = sum(math.prod(leaf.shape) for leaf in top_leaves(spec).values())
    active = total
    for i in range(spec.num_layers):
        for leaf in layer_leaves(spec, i).values():
            size = math.prod(leaf.shape)
            total += size
            if leaf.experts and spec.moe is not None:
                size = size // spec.moe.num_experts * spec.moe.top_k
            active += size
    return total, active


def arranged_shape(leaf: Leaf, tensor_size: int) -> tuple[int, ...]:
    """The leaf's shape after `arrange`: larger where kv heads are replicated, and where rows of
    the vocabulary do not divide."""
    if leaf.padded:
        return (-(-leaf.shape[0] // tensor_size) * tensor_size, *leaf.shape[1:])
    if leaf.split is None or not leaf.parts:
        return leaf.shape
    rows = sum(max(units, tensor_size) * rows for units, rows in leaf.parts)
    return (*leaf.shape[: leaf.split], rows, *leaf.shape[leaf.split + 1 :])


def arrange(
    name: str,
    array: np.ndarray,
    spec: DecoderSpec,
    tensor_size: int,
    *,
    expert_parallel: bool = False,
) -> np.ndarray:
    """A leaf as loaded (q, k, v or gate, up joined whole) laid out shard by shard.

    Fewer kv heads than shards are repeated, so that every shard has the one that its query heads
    read. The identity for other leaves and for one shard.
    """
    leaf = leaf_of(spec, name)
    whole_experts = leaf.experts and expert_parallel
    if leaf.padded and (missing := -array.shape[0] % tensor_size):
        return np.pad(array, ((0, missing), (0, 0)))
    if tensor_size == 1 or leaf.split is None or not leaf.parts or whole_experts:
        return array
    pieces: list[np.ndarray] = []
    for shard in range(tensor_size):
        at = 0
        for units, rows in leaf.parts:
            count = max(1, units // tensor_size)
            first = shard * units // tensor_size
            start = at + first * rows
            index = (slice(None),) * leaf.split + (slice(start, start + count * rows),)
            pieces.append(array[index])
            at += units * rows
    return np.concatenate(pieces, axis=leaf.split)
