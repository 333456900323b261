"""Paged attention of a mixed batch on the GPU's cache layout, by the Hopper kernel or by XLA.

The cache of a layer is [N blocks, 2 (keys, values), G heads, P tokens, C]: a head's part of a
block is one contiguous run, so TMA brings it in one copy; a block's keys and values lie together
for offload, and the heads' axis shards. (The CPU engine's token-major cache has its own functions
in reference.py.)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import device, tuning
from jaxengine.pallas_kernels.paged_attention import mosaic
from jaxengine.pallas_kernels.paged_attention import plan as pn
from jaxengine.pallas_kernels.paged_attention.combine import combine
from jaxengine.pallas_kernels.paged_attention.config import AttentionConfig, default_config
from jaxengine.pallas_kernels.paged_attention.packing import pack, tile_heads, unpack
from jaxengine.pallas_kernels.paged_attention.ragged import ragged_attention


def unsupported(
    q_shape: tuple[int, ...], q_dtype: Any, kv_shape: tuple[int, ...], kv_dtype: Any
) -> str:
    """Why the Hopper kernel cannot take these shapes; "" if it can."""
    heads, dim = q_shape[-2:]
    kv_heads, page = kv_shape[2], kv_shape[3]
    if jnp.dtype(q_dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"queries are {jnp.dtype(q_dtype).name}, not bfloat16 or float16"
    fp8 = jnp.dtype(kv_dtype) == jnp.dtype(jnp.float8_e4m3fn)
    if not fp8 and jnp.dtype(kv_dtype) != jnp.dtype(q_dtype):
        return f"the cache is {jnp.dtype(kv_dtype).name}, the queries {jnp.dtype(q_dtype).name}"
    if dim % 16 or dim > 256:
        return f"the head width {dim} is no multiple of 16 up to 256"
    if fp8 and dim % 32:
        return f"the head width {dim} is no multiple of 32, as an fp8 cache needs"
    if page not in (8, 16, 32, 64, 128):
        return f"the block size {page} is not 8, 16, 32, 64 or 128"
    if heads // kv_heads > 64:
        return f"{heads // kv_heads} query heads share a kv head, more than 64"
    return ""


def _check(q: Any, kv_cache: Any, block_table: Any, sinks: Any, kv_scales: Any) -> None:
    if q.ndim != 3 or kv_cache.ndim != 5 or block_table.ndim != 2:
        raise ValueError(
            "q must be [T, H, C], kv_cache [N, 2, G, P, C] and block_table [S, W]; got "
            f"{q.shape}, {kv_cache.shape}, {block_table.shape}"
        )
    heads, dim = q.shape[1:]
    kv_heads = kv_cache.shape[2]
    if kv_cache.shape[1] != 2 or kv_cache.shape[4] != dim:
        raise ValueError(f"kv_cache {kv_cache.shape} does not fit q {q.shape}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} kv heads")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], got {sinks.shape}")
    if kv_scales is not None and kv_scales.shape != (kv_heads, 2):
        raise ValueError(f"kv_scales must be [{kv_heads}, 2], got {kv_scales.shape}")


def choose_config(
    tokens: int, rows: int, heads: int, kv_cache: Any, *, extras: bool = False
) -> AttentionConfig:
    """The measured configuration for a batch of at most `tokens` in `rows` rows, or a default;
    `extras` where scores are capped or have sinks. A plan and its calls need the same."""
    _, _, kv_heads, page, dim = kv_cache.shape
    group, per_row = heads // kv_heads, -(-tokens // rows)
    key: dict[str, Any] = {"head_dim": dim, "group": group, "page": page}
    key |= {"kv": jnp.dtype(kv_cache.dtype).name, "tokens_per_row_bucket": per_row}
    tuned = tuning.measured("paged_attention", key)
    fp8 = jnp.dtype(kv_cache.dtype).itemsize == 1
    if tuned and not extras:
        return AttentionConfig(**tuned)
    return default_config(dim, per_row, group, fp8, extras=extras)


def make_plan(
    q_start: Any,
    kv_len: Any,
    *,
    num_tokens: int,
    heads: int,
    kv_heads: int,
    config: AttentionConfig,
    num_sms: int,
    window: int = 0,
    split: bool = True,
    xp: Any = np,
) -> pn.AttentionPlan:
    """The step's plan, to be shared by all layers with the same window."""
    tile_tokens = config.rows // (heads // kv_heads)
    return pn.plan_attention(
        q_start,
        kv_len,
        tile_tokens=tile_tokens,
        kv_heads=kv_heads,
        block_kv=config.block_kv,
        num_ctas=num_sms * config.lanes,
        num_tiles=pn.max_tiles(num_tokens, kv_len.shape[0], tile_tokens),
        window=window,
        split=split,
        xp=xp,
    )


def paged_attention(
    q: Float[Array, "T H C"],
    kv_cache: Float[Array, "N 2 G P C"],
    block_table: Int[Array, "S W"],
    q_start: Int[Array, "S1"],
    kv_len: Int[Array, "S"],
    *,
    scale: float = 1.0,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Float[Array, "H"] | None = None,
    kv_scales: Float[Array, "G 2"] | None = None,
    plan: pn.AttentionPlan | None = None,
    config: AttentionConfig | None = None,
    backend: str = "auto",
    num_sms: int | None = None,
    interpret: Any = None,
) -> Float[Array, "T H C"]:
    """Causal attention of tokens q_start[i] .. q_start[i + 1] - 1 as row i's newest.

    Row i's keys and values (those of the new tokens too) are the first kv_len[i] slots of its
    blocks. window > 0 lets a token see its last `window` keys; soft_cap > 0 bounds scores by
    tanh; sinks are extra logits without a value. Tokens of no row give 0. A given `plan` must
    have been made by `make_plan` with the same config and window. Raises ValueError for shapes
    that do not fit, and for backend "mosaic" where it cannot run.
    """
    _check(q, kv_cache, block_table, sinks, kv_scales)
    tokens, heads, dim = q.shape
    kv_heads = kv_cache.shape[2]
    group = heads // kv_heads
    fp8 = jnp.dtype(kv_cache.dtype).itemsize == 1
    if config is None:
        extras = soft_cap > 0 or sinks is not None
        config = choose_config(tokens, kv_len.shape[0], heads, kv_cache, extras=extras)
    if fp8 and config.compute_wgs != 1:
        raise ValueError("an fp8 cache needs a config with compute_wgs=1")
    reason = unsupported(q.shape, q.dtype, kv_cache.shape, kv_cache.dtype)
    use_mosaic = device.choose("paged_attention", backend, reason, simulated=interpret is not None)
    if plan is None:
        plan = make_plan(
            q_start,
            kv_len,
            num_tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            config=config,
            num_sms=num_sms or device.num_sms(),
            window=window,
            xp=jnp,
        )
    tiles, ctas = jnp.asarray(plan.tiles), jnp.asarray(plan.ctas)
    tile_tokens = config.rows // group
    if not use_mosaic:
        return ragged_attention(
            q,
            kv_cache,
            block_table,
            tiles,
            tile_tokens=tile_tokens,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            kv_scales=kv_scales,
        )
    # bfloat16 has no exact conversion from fp8 on these tensor cores; float16 has.
    working = q.astype(jnp.float16) if fp8 else q
    by_row = tile_heads(heads, group, config.rows)
    out, part_o, part_ml = mosaic.attend(
        pack(working, tiles, group=group, rows=config.rows),
        kv_cache,
        tiles,
        ctas,
        block_table,
        config=config,
        group=group,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.astype(jnp.float32)[by_row],
        kv_scales=kv_scales,
        interpret=interpret,
    )
    out = combine(out, part_o, part_ml, ctas, interpret=interpret)
    return unpack(out, tiles, group=group, tokens=tokens).astype(q.dtype)
