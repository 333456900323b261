"""Which expert a token goes to, and where its row lies in the experts' table (XLA)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ALIGN = 8  # rows; a TMA tile's height, so every expert's rows start at a multiple of it
EXPERT, FIRST, ROWS, USED = range(4)  # columns of the tile table


def route(
    logits: Float[Array, "T E"],
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalise: bool = True,
    bias: Float[Array, "E"] | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Weights and ids of each token's experts.

    scoring: "softmax" over all experts, "sigmoid" (DeepSeek-V3), or "topk_softmax" over the
    chosen logits (gpt-oss). `bias` shifts the choice but not the weights. With num_groups > 1
    experts are chosen from the `top_groups` groups whose two best sum highest. Raises ValueError
    for another scoring.
    """
    logits = logits.astype(jnp.float32)
    if scoring == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    elif scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    elif scoring == "topk_softmax":
        scores = logits
    else:
        raise ValueError(f"scoring must be softmax, sigmoid or topk_softmax, not {scoring!r}")
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        tokens, experts = choice.shape
        grouped = choice.reshape(tokens, num_groups, experts // num_groups)
        strength = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        kept = jax.lax.top_k(strength, top_groups)[1]
        mask = jax.nn.one_hot(kept, num_groups, dtype=jnp.bool_).any(1)
        choice = jnp.where(mask[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
    ids = jax.lax.top_k(choice, top_k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if scoring == "topk_softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    elif renormalise:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-20)
    return weights * scale, ids


class Dispatch(NamedTuple):
    """Where rows lie. Expert e owns rows starts[e] .. starts[e] + counts[e] - 1."""

    position: Int[Array, "T K"]  # row of token t's k-th copy; num_rows for experts not here
    token: Int[Array, "R"]  # token of each row; T where there is none
    starts: Int[Array, "E"]
    counts: Int[Array, "E"]


def num_rows(tokens: int, top_k: int, experts: int) -> int:
    """Rows of the table that always suffice, a multiple of 64 and at least 64 past the last."""
    rows = tokens * top_k + (ALIGN - 1) * min(experts, tokens * top_k)
    return -(-rows // 64) * 64 + 64


def dispatch(ids: Int[Array, "T K"], experts: int) -> Dispatch:
    """Counting sort of the tokens' copies by expert, stable, so the same on every run.

    An id outside 0 .. experts - 1 (an expert of another device, a padding token) gets no row.
    """
    tokens, top_k = ids.shape
    rows = num_rows(tokens, top_k, experts)
    flat = ids.reshape(-1)
    owned = (flat[:, None] == jnp.arange(experts)[None]).astype(jnp.int32)
    seen = jnp.cumsum(owned, axis=0)
    counts = seen[-1]
    rank = (owned * (seen - 1)).sum(-1)
    room = -(-counts // ALIGN) * ALIGN
    starts = jnp.cumsum(room) - room
    here = (flat >= 0) & (flat < experts)
    position = jnp.where(here, starts[jnp.clip(flat, 0, experts - 1)] + rank, rows)
    source = jnp.arange(tokens * top_k, dtype=jnp.int32) // top_k
    token = jnp.full((rows,), tokens, jnp.int32)
    token = token.at[position].set(source, mode="drop", unique_indices=False)
    return Dispatch(position.reshape(tokens, top_k), token, starts, counts)


def gather_rows(x: Float[Array, "T D"], where: Dispatch) -> Float[Array, "R D"]:
    """The experts' table: each copy's token; zeros in rows that nobody owns."""
    return x.at[where.token].get(mode="fill", fill_value=0)


def combine(
    y: Float[Array, "R D"], where: Dispatch, weights: Float[Array, "T K"]
) -> Float[Array, "T D"]:
    """Weighted sum of each token's copies: a gather, so without atomics and always the same."""
    rows = y.at[where.position].get(mode="fill", fill_value=0).astype(jnp.float32)
    return (rows * weights[:, :, None].astype(jnp.float32)).sum(1).astype(y.dtype)


def plan_tiles(
    starts: Int[Array, "E"], counts: Int[Array, "E"], rows: int, block_m: int
) -> Int[Array, "tiles 4"]:
    """Tiles of block_m rows, expert by expert: expert, first row / 8 (so that the compiler sees a
    multiple of 8), own rows (a multiple of 8), number of tiles. Experts without rows have none."""
    experts = counts.shape[0]
    size = rows // block_m + experts
    tiles = -(-counts // block_m)
    end = jnp.cumsum(tiles)
    index = jnp.arange(size)
    expert = jnp.minimum(jnp.searchsorted(end, index, side="right"), experts - 1)
    inside = (index - (end[expert] - tiles[expert])) * block_m
    own = jnp.clip(-(-(counts[expert] - inside) // ALIGN) * ALIGN, 0, block_m)
    used = jnp.full((size,), end[-1])
    table = jnp.stack([expert, (starts[expert] + inside) // ALIGN, own, used], axis=1)
    return table.astype(jnp.int32)
