"""Multi-head latent attention with absorbed projections: the cache holds latents only."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxengine.models.layers.attention import AttentionPlan, LayerCache, live_lengths
from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.norm import rms_norm
from jaxengine.models.layers.rope import apply_rope
from jaxengine.models.spec import DecoderSpec
from jaxengine.pallas_kernels import device
from jaxengine.pallas_kernels.kv_write import kv_write
from jaxengine.pallas_kernels.mla_attention import api
from jaxengine.parallel.layout import StepLayout


def latent_work(plan: AttentionPlan, layout: StepLayout, spec: DecoderSpec) -> AttentionPlan:
    """The plan with the kernel's work list, to be shared by all layers."""
    if layout.attention_backend != "mosaic":
        return plan
    work = api.make_plan(
        plan.q_start,
        live_lengths(plan),
        num_tokens=plan.positions.shape[0],
        heads=spec.num_heads,
        num_sms=device.num_sms(),
    )
    return plan._replace(work=(work,))


def latent_attention(
    spec: DecoderSpec,
    p: dict[str, Any],
    x: Float[Array, "T D"],
    cache: LayerCache,
    plan: AttentionPlan,
    layout: StepLayout,
    tables: tuple[Array, Array],
) -> tuple[Float[Array, "T HV"], LayerCache]:
    """Heads' outputs side by side (before `o`), float32, and the cache with the new latents.

    Instead of expanding every cached latent to keys and values, queries go through the key
    projection and results through the value projection (DeepSeek-AI, 2024).
    """
    mla = spec.mla
    assert mla is not None
    tokens, heads = x.shape[0], spec.num_heads
    if mla.q_rank:
        q = linear(rms_norm(linear(x, p["q_a"]), p["q_a_norm"], mla.norm_eps), p["q_b"])
    else:
        q = linear(x, p["q"])
    q = q.reshape(tokens, heads, mla.nope_dim + mla.rope_dim)
    plain, rotary = q[..., : mla.nope_dim], apply_rope(q[..., mla.nope_dim :], *tables)
    row = linear(x, p["kv_a"])
    latent = rms_norm(row[:, : mla.latent], p["kv_a_norm"], mla.norm_eps)
    key = apply_rope(row[:, None, mla.latent :], *tables)[:, 0]
    stored = kv_write(cache[0], jnp.concatenate([latent, key], -1), plan.kv_slot[0])

    up = p["kv_b"].reshape(heads, mla.nope_dim + mla.value_dim, mla.latent)
    to_key, to_value = up[:, : mla.nope_dim], up[:, mla.nope_dim :]
    query = jnp.concatenate([_heads("thn,hnl->thl", plain, to_key), rotary], -1)
    if layout.attention_backend != "xla":
        query = query.astype(stored.dtype)
    attended = api.mla_attention(
        query,
        stored,
        plan.block_table[0],
        plan.q_start,
        live_lengths(plan),
        scale=spec.attention_scale,
        latent=mla.latent,
        plan=plan.work[0] if plan.work else None,
        backend=layout.attention_backend,
    )
    out = _heads("thl,hvl->thv", attended, to_value)
    return out.reshape(tokens, heads * mla.value_dim), (stored,)


def _heads(how: str, x: Array, weight: Array) -> Array:
    """A product of every head's own, in the weights' type, summed in float32."""
    return jnp.einsum(how, x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)
