"""Latent attention of a mixed batch, by the Hopper kernel or by XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import device
from jaxengine.pallas_kernels.mla_attention import mosaic
from jaxengine.pallas_kernels.mla_attention.reference import latent_attention
from jaxengine.pallas_kernels.paged_attention import plan as pn
from jaxengine.pallas_kernels.paged_attention.combine import combine
from jaxengine.pallas_kernels.paged_attention.packing import pack, unpack


def unsupported(q: Any, cache: Any, latent: int) -> str:
    """Why the Hopper kernel cannot take these operands; "" if it can."""
    heads, dim = q.shape[-2:]
    if q.dtype != cache.dtype or jnp.dtype(q.dtype).name not in ("bfloat16", "float16"):
        return f"operands are {q.dtype} and {cache.dtype}, not both bfloat16 or float16"
    if latent % 128 or latent > 512 or dim % 64 or dim > 576:
        return f"latents of {latent} in rows of {dim} are not 128 .. 512 in up to 576"
    if heads > 64 and heads % 64:
        return f"{heads} heads are more than 64 and no multiple of it"
    if cache.shape[1] not in (8, 16, 32, 64, 128):
        return f"the block size {cache.shape[1]} is not 8, 16, 32, 64 or 128"
    return ""


def make_plan(
    q_start: Any, kv_len: Any, *, num_tokens: int, heads: int, num_sms: int, xp: Any = jnp
) -> pn.AttentionPlan:
    """The step's plan, to be shared by all layers."""
    virtual = max(1, heads // 64)
    tile_tokens = 64 // (heads // virtual)
    return pn.plan_attention(
        q_start,
        kv_len,
        tile_tokens=tile_tokens,
        kv_heads=virtual,
        block_kv=mosaic.BLOCK_KV,
        num_ctas=num_sms,
        num_tiles=pn.max_tiles(num_tokens, kv_len.shape[0], tile_tokens),
        xp=xp,
    )


def mla_attention(
    q: Float[Array, "T H X"],
    cache: Float[Array, "N P X"],
    block_table: Int[Array, "S W"],
    q_start: Int[Array, "S1"],
    kv_len: Int[Array, "S"],
    *,
    scale: float,
    latent: int = 512,
    plan: pn.AttentionPlan | None = None,
    backend: str = "auto",
    num_sms: int | None = None,
    interpret: Any = None,
) -> Float[Array, "T H L"]:
    """Causal attention with q already multiplied into the latent space (X = latent + rotary).

    A cached row is the key of every head, its first `latent` columns the value; the result is to
    be multiplied by the value up-projection. Rows and tokens are as in paged_attention. Raises
    ValueError for shapes that do not fit, and for backend "mosaic" where it cannot run.
    """
    if q.ndim != 3 or cache.ndim != 3 or cache.shape[2] != q.shape[2] or latent > q.shape[2]:
        raise ValueError(f"cache {cache.shape} and latent {latent} do not fit q {q.shape}")
    tokens, heads, _ = q.shape
    virtual = max(1, heads // 64)
    group = heads // virtual
    tile_tokens = 64 // group if group <= 64 else 1
    reason = unsupported(q, cache, latent)
    use = device.choose("mla_attention", backend, reason, simulated=interpret is not None)
    sms = num_sms or device.num_sms()
    if not use:
        tiles = pn.plan_attention(
            q_start,
            kv_len,
            tile_tokens=tile_tokens,
            kv_heads=1,
            block_kv=mosaic.BLOCK_KV,
            num_ctas=1,
            num_tiles=pn.max_tiles(tokens, kv_len.shape[0], tile_tokens),
            xp=jnp,
        ).tiles
        return latent_attention(
            q, cache, block_table, tiles, tile_tokens=tile_tokens, latent=latent, scale=scale
        )
    if plan is None:
        plan = make_plan(q_start, kv_len, num_tokens=tokens, heads=heads, num_sms=sms)
    tiles, ctas = jnp.asarray(plan.tiles), jnp.asarray(plan.ctas)
    out, part_o, part_ml = mosaic.attend(
        pack(q, tiles, group=group, rows=64),
        cache,
        tiles,
        ctas,
        block_table,
        group=group,
        latent=latent,
        scale=scale,
        interpret=interpret,
    )
    out = combine(out, part_o, part_ml, ctas, interpret=interpret)
    return unpack(out, tiles, group=group, tokens=tokens).astype(q.dtype)
