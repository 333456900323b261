"""The answers of every kernel beside float64 on the host, for `device_check.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Case, build, f64
from gpu_record import check

from jaxengine.pallas_kernels import moe
from jaxengine.pallas_kernels.block_copy import gather_blocks, scatter_blocks
from jaxengine.pallas_kernels.kv_write.api import write_kv
from jaxengine.pallas_kernels.mla_attention import mla_attention
from jaxengine.pallas_kernels.paged_attention import api
from jaxengine.pallas_kernels.paged_attention.config import AttentionConfig
from jaxengine.pallas_kernels.quant_matmul import quant_matmul, quantise
from jaxengine.pallas_kernels.quant_matmul.reference import dequantise, quantise_tokens


def attention_cases() -> list[tuple[str, Case, AttentionConfig | None]]:
    """About 40 shapes: groups, widths, block sizes, windows, caps, sinks, long rows, fp8."""
    b16: dict[str, Any] = {"dtype": jnp.bfloat16}
    mixed = ((1, 700), (0, 0), (33, 100), (1, 1), (1, 64), (70, 200))
    cases: list[tuple[str, Case, AttentionConfig | None]] = []
    for group, heads in ((1, 4), (2, 2), (4, 2), (5, 1), (7, 2), (8, 2), (16, 1)):
        cases.append((f"group {group}", Case(mixed, group, heads, 128, 64, **b16), None))
    for dim in (64, 80, 96, 128, 192, 256):
        cases.append((f"width {dim}", Case(mixed, 4, 2, dim, 64, **b16), None))
    for page in (8, 16, 32, 64, 128):
        for tiles in (AttentionConfig(), AttentionConfig(2, 128, 2, 1)):
            name = f"page {page} rows {tiles.rows}"
            cases.append((name, Case(mixed, 4, 2, 128, page, **b16), tiles))
    for window in (1, 64, 70, 128):
        cases.append((f"window {window}", Case(mixed, 4, 2, 64, 16, window, **b16), None))
    for tiles in (AttentionConfig(), AttentionConfig(2, 128, 2, 1)):
        case = Case(mixed, 8, 2, 64, 16, 128, 0.0, True, **b16)
        cases.append((f"sinks rows {tiles.rows}", case, tiles))
        case = Case(mixed, 2, 2, 128, 16, 0, 30.0, **b16)
        cases.append((f"soft cap rows {tiles.rows}", case, tiles))
    for stages, lanes in ((2, 1), (3, 1), (4, 1), (2, 2)):
        tiles = AttentionConfig(1, 64, stages, lanes)
        cases.append((f"stages {stages} lanes {lanes}", Case(mixed, 4, 8, 128, 64, **b16), tiles))
    long = ((1, 140_000), (1, 3))
    cases.append(("140k keys", Case(long, 4, 1, 128, 64, **b16), None))
    cases.append(("140k keys, sinks", Case(long, 8, 1, 64, 64, sinks=True, **b16), None))
    prompt = ((500, 1500), (257, 257))
    cases.append(("prefill", Case(prompt, 4, 2, 128, 64, **b16), None))
    cases.append(("prefill window", Case(prompt, 4, 2, 128, 64, 300, **b16), None))
    for page in (16, 64):
        cases.append((f"fp8 page {page}", Case(mixed, 4, 2, 128, page, fp8=True, **b16), None))
    return cases


def attention(b: Any, case: Case, tiles: AttentionConfig | None) -> Callable[[], Any]:
    arrays = [jnp.asarray(x) for x in (b.q, b.kv, b.table, b.q_start, b.kv_len)]
    run = jax.jit(
        lambda *a: api.paged_attention(
            *a,
            scale=case.scale,
            window=case.window,
            soft_cap=case.soft_cap,
            sinks=None if b.sinks is None else jnp.asarray(b.sinks),
            kv_scales=None if b.kv_scales is None else jnp.asarray(b.kv_scales),
            config=tiles,
            backend="mosaic",
        )
    )
    return lambda: run(*arrays)


def correctness() -> None:
    for name, case, tiles in attention_cases():
        b = build(case)
        check(f"attention {name}", attention(b, case, tiles), b.expected, 6e-3)
    rng = np.random.default_rng(0)
    small_kernels(rng)
    experts(rng)
    latents(rng)


def small_kernels(rng: np.random.Generator) -> None:
    cache = jnp.asarray(rng.standard_normal((9, 2, 4, 16, 128)), jnp.bfloat16)
    ids = jnp.asarray([3, 8, -1, 0, 9], jnp.int32)
    blocks = jnp.asarray(rng.standard_normal((5, *cache.shape[1:])), jnp.bfloat16)
    picked, placed = np.zeros(blocks.shape), f64(cache)
    for i, block in enumerate([3, 8, -1, 0, 9]):
        if 0 <= block < 9:
            picked[i], placed[block] = f64(cache)[block], f64(blocks)[i]
    check("gather blocks", lambda: gather_blocks(cache, ids, backend="mosaic"), picked, 1e-9)
    place = jax.jit(lambda: scatter_blocks(cache, ids, blocks, backend="mosaic"))
    check("scatter blocks", place, placed, 1e-9)
    k, v = (jnp.asarray(rng.standard_normal((20, 4, 128)), jnp.bfloat16) for _ in range(2))
    slots = jnp.asarray(rng.permutation(9 * 16)[:20], jnp.int32).at[3].set(-1)
    angle = jnp.asarray(rng.uniform(0, 6, (20, 64)), jnp.float32)
    for kind, limit in ((jnp.bfloat16, 3e-3), (jnp.float8_e4m3fn, 3e-2)):
        more = {"cos": jnp.cos(angle), "sin": jnp.sin(angle), "kv_scales": jnp.ones((4, 2))}
        into = cache.astype(kind)
        want = f64(write_kv(into, k, v, slots, backend="xla", **more))
        write = jax.jit(lambda c, m=more: write_kv(c, k, v, slots, backend="mosaic", **m))
        check(f"kv write {jnp.dtype(kind).name}", lambda c=into, w=write: w(c), want, limit)
    w = jnp.asarray(rng.standard_normal((4096, 4096)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((7, 4096)), jnp.bfloat16)
    for kind_name in ("int8", "int4"):
        for group in (0, 128):
            q = quantise(w, kind_name, group)
            want = f64(x) @ np.asarray(dequantise(q), np.float64).T
            product = jax.jit(lambda x, q: quant_matmul(x, q, backend="mosaic"))
            check(f"{kind_name} group {group}", lambda q=q, p=product: p(x, q), want, 4e-3)
    for rows in (1, 7, 40, 300):
        x = jnp.asarray(rng.standard_normal((rows, 4096)), jnp.bfloat16)
        for whole, fixed in ((False, None), (True, jnp.float32(0.01))):
            q = quantise(w, "fp8", whole=whole)
            values, scales = quantise_tokens(x, fixed)
            want = f64(values) * f64(scales)[:, None] @ np.asarray(dequantise(q), np.float64).T
            product = jax.jit(lambda x, q, s=fixed: quant_matmul(x, q, x_scale=s, backend="mosaic"))
            name = f"fp8 tokens {rows} {'per tensor' if whole else 'per channel and token'}"
            # The tensor cores' own rounding of fp8 sums comes on top of bfloat16's.
            check(name, lambda x=x, q=q, p=product: p(x, q), want, 6e-3)


def experts(rng: np.random.Generator) -> None:
    swapped = [moe.MoeConfig(2, 128, 128, 3, True, rows) for rows in (8, 16, 32)]
    for count, tokens, tiles, name in (
        (8, 300, None, "silu"),
        (128, 40, None, "silu"),
        (128, 2000, None, "gelu"),
        (32, 50, None, "clamped_swiglu"),
        (32, 3000, None, "clamped_swiglu"),
        (8, 300, moe.MoeConfig(2, 128, 64, 4), "silu"),
        (8, 20, moe.MoeConfig(1, 128, 64, 4), "silu"),
        *((8, 60, tiles, "clamped_swiglu") for tiles in swapped),
    ):
        width, inner = 512, 256
        x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.bfloat16)
        w = jnp.asarray(rng.standard_normal((count, 2 * inner, width)) / 16, jnp.bfloat16)
        bias = jnp.asarray(rng.standard_normal((count, 2 * inner)), jnp.bfloat16)
        # A few experts get no token.
        ids = jnp.asarray(rng.integers(0, max(count - 2, 1), (tokens, 2)), jnp.int32)
        d = moe.dispatch(ids, count)
        owner = np.asarray(ids).reshape(-1)
        copies, y = np.repeat(f64(x), 2, 0), np.zeros((2 * tokens, 2 * inner))
        for e in range(count):
            y[owner == e] = copies[owner == e] @ f64(w[e]).T + f64(bias[e])
        run = jax.jit(
            lambda x, w, b, d, c=tiles, n=name: moe.grouped_matmul(
                moe.routing.gather_rows(x, d), w, d.starts, d.counts, bias=b,
                activation=n, config=c, backend="mosaic",
            )[d.position.reshape(-1)]
        )  # fmt: skip
        want = activated(name, *np.split(y, 2, -1))
        label = f"experts {count} tokens {tokens} {name}"
        if tiles is not None:
            label += f" rows {tiles.block_m}{' swapped' if tiles.swap else ''}"
        check(label, lambda x=x, w=w, b=bias, d=d, r=run: r(x, w, b, d), want, 6e-3)


def activated(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if name == "gelu":
        inside = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return np.asarray(0.5 * gate * (1 + np.tanh(inside)) * up)
    if name == "clamped_swiglu":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1
        return np.asarray(gate / (1 + np.exp(-1.702 * gate)) * up)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def latents(rng: np.random.Generator) -> None:
    for heads, q_len, kv_len in ((16, 1, 3000), (128, 1, 900), (128, 9, 500)):
        blocks = -(-kv_len // 64)
        cache = jnp.asarray(rng.standard_normal((blocks + 1, 64, 576)), jnp.bfloat16)
        q = jnp.asarray(rng.standard_normal((q_len, heads, 576)), jnp.bfloat16)
        table = jnp.asarray(rng.permutation(blocks)[None], jnp.int32)
        keys = f64(cache)[np.asarray(table[0])].reshape(-1, 576)[:kv_len]
        want = np.zeros((q_len, heads, 512))
        for t in range(q_len):
            seen = keys[: kv_len - q_len + t + 1]
            s = f64(q[t]) @ seen.T * 0.05
            p = np.exp(s - s.max(-1, keepdims=True))
            want[t] = p / p.sum(-1, keepdims=True) @ seen[:, :512]
        start, length = jnp.array([0, q_len]), jnp.array([kv_len])
        run = jax.jit(lambda *a: mla_attention(*a, scale=0.05, backend="mosaic"))
        args = (q, cache, table, start, length)
        check(f"latent heads {heads} q {q_len}", lambda a=args, r=run: r(*a), want, 6e-3)
