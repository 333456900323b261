"""Random paged batches and their attention in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int], ...]  # (new tokens, keys) of each row
    group: int = 4
    kv_heads: int = 2
    dim: int = 64
    page: int = 16
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    fp8: bool = False
    dtype: Any = jnp.float32
    seed: int = 0
    extra_tokens: int = 0  # padding after the last row

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


@dataclass
class Batch:
    q: Any
    kv: Any
    table: Any
    q_start: Any
    kv_len: Any
    sinks: Any
    kv_scales: Any
    expected: np.ndarray = field(repr=False)


def f64(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32)).astype(np.float64)


def build(case: Case) -> Batch:
    """Blocks are permuted; every slot that no row owns holds NaN."""
    rng = np.random.default_rng(case.seed)
    q_len = np.array([r[0] for r in case.rows])
    kv_len = np.array([r[1] for r in case.rows], np.int32)
    q_start = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    tokens = int(q_start[-1]) + case.extra_tokens
    need = [-(-int(k) // case.page) for k in kv_len]
    blocks = sum(need) + 3
    order = rng.permutation(blocks)
    table = np.full((len(case.rows), max(need) + 1), order[-1], np.int32)
    owned = np.zeros((blocks, case.page), bool)
    used = 0
    for i, n in enumerate(need):
        table[i, :n] = order[used : used + n]
        used += n
        for b in range(n):
            owned[table[i, b], : min(case.page, kv_len[i] - b * case.page)] = True
    kv_type = jnp.float8_e4m3fn if case.fp8 else case.dtype
    shape = (blocks, 2, case.kv_heads, case.page, case.dim)
    clean = jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(kv_type)
    hole = jnp.asarray(~owned)[:, None, None, :, None]
    poisoned = jnp.where(hole, jnp.nan, clean.astype(jnp.float32)).astype(kv_type)
    heads = case.kv_heads * case.group
    q = jnp.asarray(rng.standard_normal((tokens, heads, case.dim)), jnp.float32)
    q = q.astype(case.dtype)
    sinks = rng.standard_normal(heads).astype(np.float32) if case.sinks else None
    scales = rng.uniform(0.5, 2, (case.kv_heads, 2)).astype(np.float32) if case.fp8 else None
    batch = Batch(q, poisoned, table, q_start, kv_len, sinks, scales, np.zeros(()))
    batch.expected = expected(case, batch, f64(clean))
    return batch


def expected(case: Case, b: Batch, kv: np.ndarray) -> np.ndarray:
    q = f64(b.q)
    out = np.zeros(q.shape)
    for i, (q_len, kv_len) in enumerate(case.rows):
        pages = kv[b.table[i, : -(-kv_len // case.page)]]
        for g in range(case.kv_heads if kv_len else 0):
            k = pages[:, 0, g].reshape(-1, case.dim)[:kv_len]
            v = pages[:, 1, g].reshape(-1, case.dim)[:kv_len]
            if b.kv_scales is not None:
                k, v = k * float(b.kv_scales[g, 0]), v * float(b.kv_scales[g, 1])
            heads = slice(g * case.group, (g + 1) * case.group)
            x = q[b.q_start[i] : b.q_start[i + 1], heads]
            s = np.einsum("thc,sc->ths", x, k) * case.scale
            if case.soft_cap:
                s = np.tanh(s / case.soft_cap) * case.soft_cap
            at = np.arange(kv_len)[None]
            of = (kv_len - q_len + np.arange(q_len))[:, None]
            seen = at <= of
            if case.window:
                seen &= at > of - case.window
            s = np.where(seen[:, None], s, -np.inf)
            sink = np.full((q_len, case.group, 1), -np.inf)
            if b.sinks is not None:
                sink = np.broadcast_to(b.sinks[heads][None, :, None], sink.shape)
            top = np.maximum(s.max(-1, keepdims=True), sink)
            p = np.exp(s - top)
            p /= p.sum(-1, keepdims=True) + np.exp(sink - top)
            out[b.q_start[i] : b.q_start[i + 1], heads] = np.einsum("ths,sc->thc", p, v)
    return out


def relative(got: Any, want: np.ndarray) -> float:
    """Relative l2 error; infinite where anything is not finite."""
    got = f64(got)
    if not np.isfinite(got).all():
        return float("inf")
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (norm if norm else 1))
