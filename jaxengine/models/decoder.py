"""The one decoder. `DecoderSpec` says which parts a family has."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxengine.models.layers.attention import (
    AttentionPlan,
    LayerCache,
    kernel_work,
    write_and_attend,
)
from jaxengine.models.layers.halves import cut_of, join, split, split_plan
from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.mla import latent_attention, latent_work
from jaxengine.models.layers.mlp import mlp
from jaxengine.models.layers.moe import choose, moe
from jaxengine.models.layers.moe_steps import Half, expert_layer
from jaxengine.models.layers.norm import rms_norm
from jaxengine.models.layers.parallel import gather_columns, lookup, row_parallel
from jaxengine.models.layers.rope import apply_rope, rope_tables
from jaxengine.models.params import param_shapes as param_shapes
from jaxengine.models.spec import DecoderSpec, Params, RopeSpec, local_spec
from jaxengine.parallel import expert_load
from jaxengine.parallel.layout import Stage, StepLayout
from jaxengine.parallel.overlap import DenseLayer, ExpertLayer, interleave

KV = tuple[LayerCache, ...]  # by layer
WHOLE = Stage()
Tables = tuple[Array, Array]  # cos and sin of every position


class LayerKind(NamedTuple):
    """What is static about a layer, beside its model: layers of a kind are traced once."""

    window: int
    group: int  # KV group
    experts: bool
    layer: int = -1  # its number, where the experts' tokens are counted


def embed(
    spec: DecoderSpec, params: Params, token_ids: Int[Array, "T"], layout: StepLayout
) -> Float[Array, "T D"]:
    """Embedding rows as float32 activations."""
    x = lookup(params["embed"], token_ids, layout)
    if spec.embed_scale != 1.0:
        # Rounded to the weights' type, as in training.
        x = x * jnp.asarray(spec.embed_scale, params["embed"].dtype).astype(jnp.float32)
    return x


def head(
    spec: DecoderSpec,
    params: Params,
    hidden: Float[Array, "R D"],
    layout: StepLayout | None = None,
) -> Float[Array, "R V"]:
    """Float32 logits of final hidden states."""
    logits = linear(hidden, params["head"] if "head" in params else params["embed"])
    if layout is not None and layout.tensor_axis:
        logits = gather_columns(logits, layout)[:, : spec.vocab_size]
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    if spec.logit_soft_cap:
        logits = jnp.tanh(logits / spec.logit_soft_cap) * spec.logit_soft_cap
    return logits


def decode(
    spec: DecoderSpec,
    params: Params,
    kv: KV,
    inputs: Int[Array, "T"] | Float[Array, "T D"],
    plan: AttentionPlan,
    layout: StepLayout,
    stage: Stage = WHOLE,
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "T W"], KV]:
    """Run the stage's layers over the step's tokens; returns hidden states and the cache.

    `inputs` are token ids for the first stage, else the stage before's hidden states; the last
    stage's are final-normed. `params["layers"]` and `kv` are the stage's. Inside a shard_map they
    are this device's, and `spec` the whole model's.

    `taps`, ascending: the states that come out of so many layers stand behind the final ones, so
    that W is D * (1 + taps). For drafters that read them; one stage without overlap.
    """
    data = layout.data_size if layout.data_axis else 1
    local = spec
    if layout.tensor_axis or layout.expert_parallel:
        local = local_spec(
            spec,
            layout.tensor_size,
            expert_parallel=layout.expert_parallel,
            devices=layout.tensor_size * data,
        )
    x = embed(local, params, inputs, layout) if stage.is_first else inputs
    layers = stage.layers(local.num_layers)
    if layout.dbo:
        x, kv = _in_halves(local, layout, params, kv, x, plan, layers.start)
        return _ended(local, x, params, stage), kv
    plan = with_work(local, layout, plan, kv)
    tables = all_rope_tables(local, plan.positions)
    valid = jnp.arange(inputs.shape[0]) < plan.num_tokens if local.moe is not None else None
    written, tapped = [], []
    for i, layer, cache in zip(layers, params["layers"], kv, strict=True):
        if i in taps:
            tapped.append(x)
        kind, of_layer = _kind(local, i, layout), _tables_of(local, i, tables)
        x, cache = _layer(local, layout, kind, x, layer, cache, plan, of_layer, valid)
        written.append(cache)
    if layers.stop in taps:
        tapped.append(x)
    ended = _ended(local, x, params, stage)
    return jnp.concatenate([ended, *tapped], -1) if tapped else ended, tuple(written)


def _ended(spec: DecoderSpec, x: Array, params: Params, stage: Stage) -> Array:
    return _norm(spec, x, params["final_norm"]) if stage.is_last else x


def _in_halves(
    spec: DecoderSpec,
    layout: StepLayout,
    params: Params,
    kv: KV,
    x: Float[Array, "T D"],
    plan: AttentionPlan,
    first_layer: int,
) -> tuple[Float[Array, "T D"], KV]:
    """The layers over two microbatches out of phase (dual-batch overlap)."""
    cut = cut_of(plan.num_tokens)
    shape = kv[0][0].shape
    num_slots = shape[0] * (shape[3] if len(shape) == 5 else shape[1])
    plans = [with_work(spec, layout, part, kv) for part in split_plan(plan, num_slots)]
    tables = [all_rope_tables(spec, part.positions) for part in plans]
    halves = [
        Half(part, jnp.arange(part.shape[0]) < of.num_tokens)
        for part, of in zip(split(x, cut), plans, strict=True)
    ]
    layers: list[ExpertLayer | DenseLayer] = []
    for i, p in enumerate(params["layers"], first_layer):
        kind = _kind(spec, i, layout)

        def attend(
            half: int, tokens: Half, cache: LayerCache, i: int = i, p: Any = p, kind: Any = kind
        ) -> tuple[Half, LayerCache]:
            of_layer = _tables_of(spec, i, tables[half])
            x, cache = _attend(spec, layout, kind, tokens.x, p, cache, plans[half], of_layer)
            return tokens._replace(x=x), cache

        def dense(
            half: int, tokens: Half, cache: LayerCache, p: Any = p, attend: Any = attend
        ) -> tuple[Half, LayerCache]:
            tokens, cache = attend(half, tokens, cache)
            y = mlp(p, _before_mlp(spec, tokens.x, p), spec.activation, layout)
            return tokens._replace(x=_add(spec, tokens.x, y, p, "mlp_post_norm")), cache

        def norm(x: Array, p: Any = p) -> Array:
            return _before_mlp(spec, x, p)

        def add(x: Array, y: Array, p: Any = p) -> Array:
            return _add(spec, x, y, p, "mlp_post_norm")

        if kind.experts:
            seen = functools.partial(_record, kind) if layout.record_experts else None
            layers.append(expert_layer(spec, layout, p, attend, norm, add, seen))
        else:
            layers.append(DenseLayer(dense))
    done, written = interleave(layers, (halves[0], halves[1]), kv)
    return join(done[0].x, done[1].x, cut, x.shape[0]), tuple(written)


def with_work(spec: DecoderSpec, layout: StepLayout, plan: AttentionPlan, kv: KV) -> AttentionPlan:
    """The plan with the kernels' work lists."""
    if spec.mla is not None:
        return latent_work(plan, layout, spec)
    extras = bool(spec.soft_cap) or spec.sinks
    return kernel_work(plan, layout, spec.groups, heads=spec.num_heads, cache=kv[0], extras=extras)


def _kind(spec: DecoderSpec, layer: int, layout: StepLayout) -> LayerKind:
    window = spec.windows[layer] if spec.windows else 0
    number = layer if layout.record_experts else -1
    return LayerKind(window, spec.groups.index(window), spec.is_moe(layer), number)


def _record(kind: LayerKind, ids: Int[Array, "T K"]) -> None:
    """Count the experts that a layer's tokens go to, on the host; -1 counts for none."""
    jax.debug.callback(expert_load.record, kind.layer, ids)


def _tables_of(spec: DecoderSpec, layer: int, tables: dict[RopeSpec, Tables]) -> Tables | None:
    rope = spec.layer_rope(layer)
    return None if rope is None else tables[rope]


def all_rope_tables(spec: DecoderSpec, positions: Int[Array, "T"]) -> dict[RopeSpec, Tables]:
    width = spec.mla.rope_dim if spec.mla is not None else spec.rotary_dim or spec.head_dim
    ropes = dict.fromkeys(spec.layer_rope(i) for i in range(spec.num_layers))
    return {rope: rope_tables(rope, width, positions) for rope in ropes if rope is not None}


def _norm(spec: DecoderSpec, x: Array, weight: Array) -> Array:
    return rms_norm(x, weight, spec.norm_eps, plus_one=spec.norm_plus_one)


# Jitted so that equal layers are traced and lowered once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(
    spec: DecoderSpec,
    layout: StepLayout,
    kind: LayerKind,
    x: Float[Array, "T D"],
    p: dict[str, Any],
    cache: LayerCache,
    plan: AttentionPlan,
    tables: Tables | None,
    valid: Bool[Array, "T"] | None,
) -> tuple[Float[Array, "T D"], LayerCache]:
    x, cache = _attend(spec, layout, kind, x, p, cache, plan, tables)
    normed = _before_mlp(spec, x, p)
    if kind.experts:
        assert valid is not None
        y = moe(spec, p, normed, valid, layout)
        if layout.record_experts:
            assert spec.moe is not None
            _record(kind, jnp.where(valid[:, None], choose(spec.moe, p, normed)[1], -1))
    else:
        y = mlp(p, normed, spec.activation, layout)
    return _add(spec, x, y, p, "mlp_post_norm"), cache


def _attend(
    spec: DecoderSpec,
    layout: StepLayout,
    kind: LayerKind,
    x: Float[Array, "T D"],
    p: dict[str, Any],
    cache: LayerCache,
    plan: AttentionPlan,
    tables: Tables | None,
) -> tuple[Float[Array, "T D"], LayerCache]:
    """The attention block with its residual."""
    normed = _norm(spec, x, p["attn_norm"]) if spec.pre_norm else x
    if spec.mla is not None:
        assert tables is not None
        attended, cache = latent_attention(spec, p, normed, cache, plan, layout, tables)
    else:
        attended, cache = attention(spec, layout, kind, normed, p, cache, plan, tables)
    y = row_parallel(attended, p["o"], layout, p.get("o_bias"))
    return _add(spec, x, y, p, "attn_post_norm"), cache


def _before_mlp(spec: DecoderSpec, x: Array, p: dict[str, Any]) -> Array:
    return _norm(spec, x, p["mlp_norm"]) if spec.pre_norm else x


def _add(spec: DecoderSpec, x: Array, y: Array, p: dict[str, Any], post_norm: str) -> Array:
    """The residual sum."""
    if spec.post_norm:
        y = _norm(spec, y, p[post_norm])
    return x + (y if spec.residual_scale == 1.0 else y * spec.residual_scale)


def attention(
    spec: DecoderSpec,
    layout: StepLayout,
    kind: LayerKind,
    x: Float[Array, "T D"],
    p: dict[str, Any],
    cache: LayerCache,
    plan: AttentionPlan,
    tables: Tables | None,
) -> tuple[Float[Array, "T HC"], LayerCache]:
    """Heads' outputs side by side, before `o`. A drafter's layer may have a wider `x`."""
    tokens = x.shape[0]
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = linear(x, p["qkv"], p.get("qkv_bias"))
    q, k, v = jnp.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=-1)
    if spec.qk_norm_wide:
        q = rms_norm(q, p["q_norm"], spec.norm_eps, axis=layout.tensor_axis)
        k = rms_norm(k, p["k_norm"], spec.norm_eps, axis=layout.tensor_axis)
    q = q.reshape(tokens, heads, dim)
    k = k.reshape(tokens, kv_heads, dim)
    if spec.qk_norm:
        q, k = _norm(spec, q, p["q_norm"]), _norm(spec, k, p["k_norm"])
    if tables is not None:
        q, k = apply_rope(q, *tables), apply_rope(k, *tables)
    attended, cache = write_and_attend(
        q, k, v.reshape(tokens, kv_heads, dim), cache, plan, layout,
        group=kind.group, window=kind.window, scale=spec.attention_scale,
        soft_cap=spec.soft_cap, sinks=p.get("sinks"),
    )  # fmt: skip
    return attended.reshape(tokens, heads * dim), cache
