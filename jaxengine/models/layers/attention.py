"""Writing a layer's keys and values into its cache and attending over it, in either layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import device
from jaxengine.pallas_kernels.kv_write import kv_write
from jaxengine.pallas_kernels.kv_write.api import write_kv
from jaxengine.pallas_kernels.paged_attention import api, decode_attention, prefill_attention
from jaxengine.parallel.layout import StepLayout

LayerCache = tuple[Array, ...]  # token_major: keys, values [N, P, G*C]; head_major: [N, 2, G, P, C]


class AttentionPlan(NamedTuple):
    """Where every token's keys go and what every query reads; group arrays lead with the group.

    Decode rows are tokens [0, num_decode); prefill tokens follow, described by `items` (see
    `prefill_attention`). `items` is None in decode-only programs. `work` are the kernels' work
    lists by group, made once a step by `kernel_work`.
    """

    positions: Int[Array, "T"]
    kv_slot: Int[Array, "groups T"]
    block_table: Int[Array, "groups S W"]
    seq_len: Int[Array, "S"]
    q_start: Int[Array, "S1"]  # row i's tokens are q_start[i] .. q_start[i + 1] - 1
    num_tokens: Int[Array, ""]
    num_decode: Int[Array, ""]
    items: Int[Array, "I four"] | None
    num_items: Int[Array, ""]
    work: tuple[Any, ...] = ()  # by group
    decode_row: Int[Array, ""] | None = None  # row of the first decode token; None = 0


def kernel_work(
    plan: AttentionPlan,
    layout: StepLayout,
    windows: tuple[int, ...],
    *,
    heads: int,
    cache: LayerCache,
    extras: bool = False,
) -> AttentionPlan:
    """The plan with the kernels' work lists, one a KV group, to be shared by its layers. `extras`:
    scores are capped or have sinks."""
    if layout.cache != "head_major":
        return plan
    tokens, rows, kv_heads = plan.positions.shape[0], plan.seq_len.shape[0], cache[0].shape[2]
    config = api.choose_config(tokens, rows, heads, cache[0], extras=extras)
    work = tuple(
        api.make_plan(
            plan.q_start,
            live_lengths(plan),
            num_tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            config=config,
            num_sms=device.num_sms(),
            window=window,
            xp=jnp,
        )
        for window in windows
    )
    return plan._replace(work=work)


def live_lengths(plan: AttentionPlan) -> Int[Array, "S"]:
    """Context lengths; 0 for rows without tokens (padding)."""
    return jnp.where(plan.q_start[1:] > plan.q_start[:-1], plan.seq_len, 0)


def write_and_attend(
    q: Float[Array, "T H C"],
    k: Float[Array, "T G C"],
    v: Float[Array, "T G C"],
    cache: LayerCache,
    plan: AttentionPlan,
    layout: StepLayout,
    *,
    group: int,
    window: int,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Float[Array, "H"] | None = None,
) -> tuple[Float[Array, "T H C"], LayerCache]:
    """Causal attention of the step's tokens over their rows' contexts, their own keys included.

    `group` is the layer's KV group and `window` its sliding window (0 = full). The result is
    float32. Tokens that belong to no row give anything.
    """
    tokens, kv_heads, dim = k.shape
    slots, table = plan.kv_slot[group], plan.block_table[group]
    if layout.cache == "token_major":
        keys = kv_write(cache[0], k.reshape(tokens, kv_heads * dim), slots)
        values = kv_write(cache[1], v.reshape(tokens, kv_heads * dim), slots)
        # Few rows a turn: a chunk of their keys fits a core's cache, and rows of very different
        # lengths do not wait for the longest.
        turn = layout.rows_per_turn
        how: dict[str, Any] = {"num_kv_heads": kv_heads, "window": window}
        how |= {"soft_cap": soft_cap, "sinks": sinks}
        out = _token_major(q * scale, keys, values, plan, table, turn, how)
        return out, (keys, values)
    kv = write_kv(cache[0], k, v, slots, backend="xla")  # a donated scatter: nothing to fuse
    config = api.choose_config(
        tokens, plan.seq_len.shape[0], q.shape[1], cache[0],
        extras=bool(soft_cap) or sinks is not None,
    )  # fmt: skip
    out = api.paged_attention(
        q.astype(kv.dtype if kv.dtype.itemsize > 1 else jnp.bfloat16),
        kv,
        table,
        plan.q_start,
        live_lengths(plan),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        plan=plan.work[group],
        config=config,
        backend=layout.attention_backend,
    )
    return out.astype(jnp.float32), (kv,)


def _token_major(
    q: Float[Array, "T H C"],
    keys: Array,
    values: Array,
    plan: AttentionPlan,
    table: Array,
    rows_per_turn: int,
    how: dict[str, Any],
) -> Float[Array, "T H C"]:
    rows = min(plan.seq_len.shape[0], q.shape[0])
    lengths, decode_table = plan.seq_len, table
    if plan.decode_row is not None:  # a second half: its decode rows are not the first ones
        lengths = _rows_from(lengths, plan.decode_row, rows)
        decode_table = _rows_from(table, plan.decode_row, rows)
    elif rows < lengths.shape[0]:
        lengths, decode_table = lengths[:rows], table[:rows]
    decoded = decode_attention(
        q[:rows], keys, values, decode_table, lengths, plan.num_decode,
        rows_per_turn=rows_per_turn, **how,
    )  # fmt: skip
    if plan.items is None:
        return decoded
    out = prefill_attention(q, keys, values, table, plan.items, plan.num_items, **how)
    is_decode = (jnp.arange(rows) < plan.num_decode)[:, None, None]
    return out.at[:rows].set(jnp.where(is_decode, decoded, out[:rows]))


def _rows_from(x: Array, start: Array, count: int) -> Array:
    """x[start : start + count], padded behind its end."""
    padded = jnp.pad(x, [(0, count)] + [(0, 0)] * (x.ndim - 1))
    return jax.lax.dynamic_slice_in_dim(padded, start, count)
