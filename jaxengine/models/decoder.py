"""The one decoder. `DecoderSpec` says which parts a family has."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.layers.attention import AttentionPlan, LayerCache, kernel_work, write_and_attend
from jaxengine.layers.linear import linear
from jaxengine.layers.norm import rms_norm
from jaxengine.layers.rope import apply_rope, rope_tables
from jaxengine.models.layout import StepLayout
from jaxengine.models.spec import DecoderSpec, Params

KV = tuple[LayerCache, ...]  # by layer


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
    layout: StepLayout,
) -> tuple[Float[Array, "T D"], KV]:
    """Run all layers over the step's tokens; returns final-normed hidden states and the cache."""
    plan = kernel_work(plan, layout, spec.groups, heads=spec.num_heads, cache=kv[0])
    x = embed(spec, params, token_ids)
    cos, sin = rope_tables(spec.rope, spec.head_dim, plan.positions)
    windows = spec.windows or (0,) * spec.num_layers
    written = []
    for layer, cache, window in zip(params["layers"], kv, windows, strict=True):
        group = spec.groups.index(window)
        x, cache = _layer(spec, layout, window, group, x, layer, cache, plan, cos, sin)
        written.append(cache)
    return rms_norm(x, params["final_norm"], spec.norm_eps), tuple(written)


# Jitted so that equal layers are traced and lowered once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _layer(
    spec: DecoderSpec,
    layout: StepLayout,
    window: int,
    group: int,
    x: Array,
    p: dict[str, Any],
    cache: LayerCache,
    plan: AttentionPlan,
    cos: Array,
    sin: Array,
) -> tuple[Array, LayerCache]:
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
    attended, cache = write_and_attend(
        apply_rope(q, cos, sin), apply_rope(k, cos, sin), v.reshape(tokens, kv_heads, dim),
        cache, plan, layout, group=group, window=window, scale=1.0 / math.sqrt(dim),
    )  # fmt: skip
    x = x + linear(attended.reshape(tokens, heads * dim), p["o"], p.get("o_bias"))
    normed = rms_norm(x, p["mlp_norm"], spec.norm_eps)
    gate, up = jnp.split(linear(normed, p["gate_up"], p.get("gate_up_bias")), 2, axis=-1)
    x = x + linear(jax.nn.silu(gate) * up, p["down"], p.get("down_bias"))
    return x, cache


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
