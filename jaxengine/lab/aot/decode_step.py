"""One step of a llama-shaped decoder made of these kernels: what the checks compile and time.

Layers are stacked and scanned, and the caches of all layers are one array, so the step holds each
kernel once and the cache is updated in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels.kv_write.head_major import rotate, write_head_major
from jaxengine.pallas_kernels.paged_attention import api
from jaxengine.pallas_kernels.paged_attention.config import AttentionConfig


@dataclass(frozen=True)
class StepShape:
    """Sizes of a dense decoder: V vocabulary, L layers, D width, H and G heads, C, F."""

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    qk_norm: bool = False
    rope_theta: float = 500000.0
    eps: float = 1e-5

    def params(self, dtype: Any = jnp.bfloat16) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the weights, those of layers stacked."""
        n, d, c = self.layers, self.width, self.head_dim
        qkv = (self.heads + 2 * self.kv_heads) * c
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (self.vocab, d),
            "head": (self.vocab, d),
            "final_norm": (d,),
            "attn_norm": (n, d),
            "mlp_norm": (n, d),
            "qkv": (n, qkv, d),
            "o": (n, d, self.heads * c),
            "gate_up": (n, 2 * self.ffn, d),
            "down": (n, d, self.ffn),
        }
        if self.qk_norm:
            shapes |= {"q_norm": (n, c), "k_norm": (n, c)}
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}

    def cache(self, blocks: int, page: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        """All layers' blocks, layer after layer."""
        shape = (self.layers * blocks, 2, self.kv_heads, page, self.head_dim)
        return jax.ShapeDtypeStruct(shape, dtype)


def norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def linear(x: Array, weight: Array) -> Array:
    return jnp.einsum("...k,nk->...n", x, weight, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


def step(
    params: dict[str, Array],
    cache: Float[Array, "LN 2 G P C"],
    tokens: Int[Array, "T"],
    positions: Int[Array, "T"],
    slots: Int[Array, "T"],
    block_table: Int[Array, "S W"],
    q_start: Int[Array, "S1"],
    kv_len: Int[Array, "S"],
    *,
    shape: StepShape,
    config: AttentionConfig,
    num_sms: int,
    backend: str = "mosaic",
) -> tuple[Int[Array, "S"], Float[Array, "LN 2 G P C"]]:
    """Greedy next token of each row, and the cache with the new tokens' keys and values.

    Donate the cache. `slots` are flat token indices in one layer's blocks; those outside are
    padding.
    """
    blocks = cache.shape[0] // shape.layers
    page, c, g = cache.shape[3], shape.head_dim, shape.kv_heads
    inverse = shape.rope_theta ** (-jnp.arange(0, c, 2, dtype=jnp.float32) / c)
    angle = positions[:, None].astype(jnp.float32) * inverse
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    plan = api.make_plan(
        q_start,
        kv_len,
        num_tokens=tokens.shape[0],
        heads=shape.heads,
        kv_heads=g,
        config=config,
        num_sms=num_sms,
        xp=jnp,
    )
    count = tokens.shape[0]
    layered = {k: v for k, v in params.items() if k not in ("embed", "head", "final_norm")}
    inside = (slots >= 0) & (slots < blocks * page)

    def layer(carry: tuple[Array, Array], index_and_weights: Any) -> tuple[Any, None]:
        x, cache = carry
        index, w = index_and_weights
        qkv = linear(norm(x, w["attn_norm"], shape.eps), w["qkv"])
        q, k, v = jnp.split(qkv, [shape.heads * c, (shape.heads + g) * c], axis=-1)
        q, k = q.reshape(count, shape.heads, c), k.reshape(count, g, c)
        if shape.qk_norm:
            q, k = norm(q, w["q_norm"], shape.eps), norm(k, w["k_norm"], shape.eps)
        q, k = rotate(q, cos, sin).astype(x.dtype), rotate(k, cos, sin).astype(x.dtype)
        at = jnp.where(inside, slots + index * (blocks * page), -1)
        cache = write_head_major(cache, k, v.reshape(count, g, c), at)
        o = api.paged_attention(
            q,
            cache,
            block_table + index * blocks,
            q_start,
            kv_len,
            scale=float(c**-0.5),
            plan=plan,
            config=config,
            backend=backend,
        )
        x = x + linear(o.reshape(count, -1), w["o"])
        gate, up = jnp.split(linear(norm(x, w["mlp_norm"], shape.eps), w["gate_up"]), 2, axis=-1)
        return (x + linear(jax.nn.silu(gate) * up, w["down"]), cache), None

    x = params["embed"][tokens]
    (x, cache), _ = lax.scan(layer, (x, cache), (jnp.arange(shape.layers), layered))
    last = norm(x[jnp.maximum(q_start[1:] - 1, 0)], params["final_norm"], shape.eps)
    return jnp.argmax(linear(last, params["head"]), axis=-1).astype(jnp.int32), cache
