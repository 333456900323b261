"""The one decoder. `DecoderSpec` says which parts a family has."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.layers.linear import linear
from jaxengine.layers.norm import rms_norm
from jaxengine.layers.rope import apply_rope, rope_tables
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.pallas_kernels.kv_write import kv_write
from jaxengine.pallas_kernels.paged_attention import decode_attention, prefill_attention

# Decode rows of one turn: a chunk of their keys fits a core's cache, and rows of very different
# lengths do not wait for the longest.
ROWS_PER_TURN = 8

KV = tuple[tuple[Array, Array], ...]  # per layer: keys, values [N, P, G*C]


class AttentionPlan(NamedTuple):
    """Where every token's keys go and what every query reads; group arrays lead with the group.

    Decode rows are tokens [0, num_decode); prefill tokens follow, described by `items`
    (see `prefill_attention`). `items` is None in decode-only programs.
    """

    positions: Int[Array, "T"]
    kv_slot: Int[Array, "groups T"]
    block_table: Int[Array, "groups S W"]
    seq_len: Int[Array, "S"]
    num_decode: Int[Array, ""]
    items: Int[Array, "I four"] | None
    num_items: Int[Array, ""]


def embed(spec: DecoderSpec, params: Params, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
    """Embedding rows as float32 activations."""
    return params["embed"][token_ids].astype(jnp.float32)


def head(spec: DecoderSpec, params: Params, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Float32 logits of final hidden states."""
    return linear(hidden, params.get("head", params["embed"]))


def decode(
    spec: DecoderSpec,
    params: Params,
    kv: KV,
    token_ids: Int[Array, "T"],
    plan: AttentionPlan,
) -> tuple[Float[Array, "T D"], KV]:
    """Run all layers over the step's tokens; returns final-normed hidden states and the cache."""
    x = embed(spec, params, token_ids)
    cos, sin = rope_tables(spec.rope, spec.head_dim, plan.positions)
    windows = spec.windows or (0,) * spec.num_layers
    written = []
    for layer, cache, window in zip(params["layers"], kv, windows, strict=True):
        group = spec.groups.index(window)
        x, cache = _layer(spec, window, group, x, layer, cache, plan, cos, sin)
        written.append(cache)
    return rms_norm(x, params["final_norm"], spec.norm_eps), tuple(written)


# Jitted so that equal layers are traced and lowered once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(
    spec: DecoderSpec,
    window: int,
    group: int,
    x: Array,
    p: dict[str, Any],
    cache: tuple[Array, Array],
    plan: AttentionPlan,
    cos: Array,
    sin: Array,
) -> tuple[Array, tuple[Array, Array]]:
    tokens = x.shape[0]
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    normed = rms_norm(x, p["attn_norm"], spec.norm_eps)
    qkv = linear(normed, p["qkv"], p.get("qkv_bias"))
    q, k, v = jnp.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=-1)
    q = q.reshape(tokens, heads, dim)
    k = k.reshape(tokens, kv_heads, dim)
    if spec.qk_norm:
        q = rms_norm(q, p["q_norm"], spec.norm_eps)
        k = rms_norm(k, p["k_norm"], spec.norm_eps)
    q = apply_rope(q, cos, sin) * (1.0 / math.sqrt(dim))
    k = apply_rope(k, cos, sin)
    keys = kv_write(cache[0], k.reshape(tokens, kv_heads * dim), plan.kv_slot[group])
    values = kv_write(cache[1], v, plan.kv_slot[group])
    attended = _attend(spec, window, q, keys, values, plan, plan.block_table[group])
    x = x + linear(attended.reshape(tokens, heads * dim), p["o"], p.get("o_bias"))
    normed = rms_norm(x, p["mlp_norm"], spec.norm_eps)
    gate, up = jnp.split(linear(normed, p["gate_up"], p.get("gate_up_bias")), 2, axis=-1)
    x = x + linear(jax.nn.silu(gate) * up, p["down"], p.get("down_bias"))
    return x, (keys, values)


def _attend(
    spec: DecoderSpec,
    window: int,
    q: Float[Array, "T H C"],
    keys: Array,
    values: Array,
    plan: AttentionPlan,
    block_table: Array,
) -> Float[Array, "T H C"]:
    rows = plan.seq_len.shape[0]
    kv_heads = spec.num_kv_heads
    if plan.items is None:
        return decode_attention(
            q, keys, values, block_table, plan.seq_len, plan.num_decode,
            num_kv_heads=kv_heads, window=window, rows_per_turn=ROWS_PER_TURN,
        )  # fmt: skip
    out = prefill_attention(
        q, keys, values, block_table, plan.items, plan.num_items,
        num_kv_heads=kv_heads, window=window,
    )  # fmt: skip
    decoded = decode_attention(
        q[:rows], keys, values, block_table, plan.seq_len, plan.num_decode,
        num_kv_heads=kv_heads, window=window, rows_per_turn=ROWS_PER_TURN,
    )  # fmt: skip
    is_decode = (jnp.arange(rows) < plan.num_decode)[:, None, None]
    return out.at[:rows].set(jnp.where(is_decode, decoded, out[:rows]))


def param_shapes(spec: DecoderSpec, dtype: Any) -> Params:
    """The parameter tree's shapes, as jax.ShapeDtypeStruct: programs compile while weights load."""
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    width, ffn, vocab = spec.hidden_size, spec.ffn_size, spec.vocab_size
    qkv = (heads + 2 * kv_heads) * dim
    layer = {
        "attn_norm": (width,),
        "qkv": (qkv, width),
        "o": (width, heads * dim),
        "mlp_norm": (width,),
        "gate_up": (2 * ffn, width),
        "down": (width, ffn),
    }
    if spec.qkv_bias:
        layer["qkv_bias"] = (qkv,)
    if spec.o_bias:
        layer["o_bias"] = (width,)
    if spec.mlp_bias:
        layer |= {"gate_up_bias": (2 * ffn,), "down_bias": (width,)}
    if spec.qk_norm:
        layer |= {"q_norm": (dim,), "k_norm": (dim,)}
    tree: dict[str, Any] = {"embed": (vocab, width), "final_norm": (width,)}
    if not spec.tie_embeddings:
        tree["head"] = (vocab, width)
    tree["layers"] = [dict(layer) for _ in range(spec.num_layers)]
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        tree,
        is_leaf=lambda node: isinstance(node, tuple),
    )
