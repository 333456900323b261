"""The speeds of kernels and decode steps, for `device_check.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_record import RESULTS, START, speed, timed

from jaxengine.lab.aot import decode_step
from jaxengine.pallas_kernels import device, moe
from jaxengine.pallas_kernels.paged_attention import api
from jaxengine.pallas_kernels.paged_attention.config import AttentionConfig, default_config
from jaxengine.pallas_kernels.quant_matmul import quant_matmul, quantise


def copy_speed() -> dict[str, Any]:
    x = jnp.zeros((1 << 30,), jnp.bfloat16)
    seconds = timed(jax.jit(lambda x: x + jnp.bfloat16(1)), x)
    return {"TB_per_s": 2 * x.nbytes / seconds / 1e12}


def decode_speed(batch: int, context: int, page: int, tiles: AttentionConfig) -> dict[str, Any]:
    heads, kv_heads, dim = 32, 8, 128
    per_row = -(-context // page)
    key = jax.random.key(0)
    shape = (batch * per_row, 2, kv_heads, page, dim)
    cache = jax.random.normal(key, shape, jnp.bfloat16)
    q = jax.random.normal(key, (batch, heads, dim), jnp.bfloat16)
    table = jax.random.permutation(key, batch * per_row).reshape(batch, per_row).astype(jnp.int32)
    start = jnp.arange(batch + 1, dtype=jnp.int32)
    length = jnp.full((batch,), context, jnp.int32)
    plan = make_plan(np.asarray(start), np.asarray(length), batch, tiles)
    plan = type(plan)(*(jnp.asarray(p) for p in plan))
    run = jax.jit(
        lambda *a: api.paged_attention(
            *a[:5], scale=0.09, config=tiles, backend="mosaic", plan=type(plan)(a[5], a[6])
        )
    )
    seconds = timed(run, q, cache, table, start, length, *plan)
    moved = batch * context * kv_heads * dim * 2 * 2
    return {"us": seconds * 1e6, "TB_per_s": moved / seconds / 1e12}


def prefill_speed(tokens: int, cudnn: bool) -> dict[str, Any]:
    heads, kv_heads, dim, page = 32, 8, 128, 64
    key = jax.random.key(0)
    q = jax.random.normal(key, (tokens, heads, dim), jnp.bfloat16)
    flops = 2 * 2 * heads * dim * tokens * tokens / 2
    if cudnn:
        kv = jax.random.normal(key, (1, tokens, kv_heads, dim), jnp.bfloat16)
        run = jax.jit(
            lambda q, kv: jax.nn.dot_product_attention(
                q[None], kv, kv, is_causal=True, implementation="cudnn"
            )
        )
        seconds = timed(run, q, kv)
    else:
        blocks = tokens // page
        cache = jax.random.normal(key, (blocks, 2, kv_heads, page, dim), jnp.bfloat16)
        table = jnp.arange(blocks, dtype=jnp.int32)[None]
        start, length = jnp.array([0, tokens]), jnp.array([tokens])
        tiles = default_config(dim, tokens, heads // kv_heads)
        run = jax.jit(
            lambda *a: api.paged_attention(*a, scale=0.09, config=tiles, backend="mosaic")
        )
        seconds = timed(run, q, cache, table, start, length)
    return {"us": seconds * 1e6, "TFLOP_per_s": flops / seconds / 1e12}


def grouped_speed(tokens: int, width: int, inner: int, count: int, ours: bool) -> dict[str, Any]:
    key = jax.random.key(0)
    w = jax.random.normal(key, (count, inner, width), jnp.bfloat16)
    sizes = jnp.full((count,), tokens // count, jnp.int32)
    starts = jnp.arange(count, dtype=jnp.int32) * (tokens // count)
    x = jax.random.normal(key, (tokens, width), jnp.bfloat16)
    if ours:
        run = jax.jit(lambda *a: moe.grouped_matmul(*a, backend="mosaic"))
        seconds = timed(run, x, w, starts, sizes, loops=5)
    else:
        run = jax.jit(lambda x, w, n: jax.lax.ragged_dot(x, w.transpose(0, 2, 1), n))
        seconds = timed(run, x, w, sizes, loops=2)
    return {"us": seconds * 1e6, "TFLOP_per_s": 2 * tokens * width * inner / seconds / 1e12}


def expert_decode_speed(swap: bool) -> dict[str, Any]:
    """Qwen3-30B-A3B's gate and up projections for a decode batch of 64 tokens."""
    key, count, width, inner = jax.random.key(0), 128, 2048, 768
    w = jax.random.normal(key, (count, 2 * inner, width), jnp.bfloat16)
    ids = jax.random.randint(key, (64, 8), 0, count)
    d = moe.dispatch(ids, count)
    x = jax.random.normal(key, (len(d.token), width), jnp.bfloat16)
    tiles = moe.MoeConfig(2, 128, 128, 2, True, 8) if swap else moe.MoeConfig(1, 128, 64, 4)
    run = jax.jit(
        lambda x, w, d: moe.grouped_matmul(
            x, w, d.starts, d.counts, activation="silu", config=tiles, backend="mosaic"
        )
    )
    seconds = timed(run, x, w, d)
    moved = int((d.counts > 0).sum()) * 2 * inner * width * 2
    return {"us": seconds * 1e6, "TB_per_s": moved / seconds / 1e12}


def fp8_speed(tokens: int, backend: str) -> dict[str, Any]:
    """llama 8B's down projection in fp8, activations quantised by token."""
    key, outputs, inputs = jax.random.key(0), 4096, 14336
    q = quantise(jax.random.normal(key, (outputs, inputs)), "fp8")
    x = jax.random.normal(key, (tokens, inputs), jnp.bfloat16)
    seconds = timed(jax.jit(lambda x, q: quant_matmul(x, q, backend=backend)), x, q)
    flops = 2 * tokens * outputs * inputs
    figures = {"us": seconds * 1e6, "TFLOP_per_s": flops / seconds / 1e12}
    return figures | {"TB_per_s": q.data.nbytes / seconds / 1e12}


def step_speed(batch: int, context: int) -> dict[str, Any]:
    """Decode of a random llama of 8B: steps one by one, then the loop as the engine runs it, with
    positions, slots and lengths made on the host each step and tokens read one step late."""
    shape = decode_step.StepShape(128256, 32, 4096, 32, 8, 128, 14336)
    page, per_row = 64, -(-context // 64)
    key = jax.random.key(0)
    params = {
        n: jax.jit(lambda k, s=s: jax.random.normal(k, s.shape, s.dtype) * 0.02)(key)
        for n, s in shape.params().items()
    }
    cache = jnp.zeros(shape.cache(batch * per_row, page).shape, jnp.bfloat16)
    table = jnp.arange(batch * per_row, dtype=jnp.int32).reshape(batch, per_row)
    tiles = default_config(128, 1, 4)
    run = jax.jit(
        lambda *a: decode_step.step(*a, shape=shape, config=tiles, num_sms=device.num_sms()),
        donate_argnums=1,
    )
    tokens = jnp.zeros((batch,), jnp.int32)
    position = jnp.full((batch,), context - 1, jnp.int32)
    slots = table[:, -1] * page + (context - 1) % page
    start, length = jnp.arange(batch + 1, dtype=jnp.int32), position + 1
    blocks, of = np.asarray(table), np.arange(batch)
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        tokens, cache = run(params, cache, tokens, position, slots, table, start, length)
        jax.block_until_ready(tokens)
        times.append(time.perf_counter() - begin)
    seconds = float(np.median(times[2:]))
    steps, pending = 40, None
    begin, planning = time.perf_counter(), 0.0
    for i in range(steps):
        host = time.perf_counter()
        at = np.full((batch,), context - steps + i, np.int32)
        slots = (blocks[of, at // page] * page + at % page).astype(np.int32)
        planning += time.perf_counter() - host
        tokens, cache = run(params, cache, tokens, at, slots, table, start, at + 1)
        if pending is not None:
            np.asarray(pending)
        pending = tokens
    jax.block_until_ready(tokens)
    loop = time.perf_counter() - begin
    host = time.perf_counter()
    make_plan(np.arange(batch + 1), at + 1, batch, tiles)
    return {
        "ms": seconds * 1e3,
        "tokens_per_s": batch / seconds,
        "loop_tokens_per_s": batch * steps / loop,
        "host_us_per_step": planning / steps * 1e6,
        "work_list_by_numpy_us": (time.perf_counter() - host) * 1e6,
    }


def make_plan(start: np.ndarray, length: np.ndarray, tokens: int, tiles: AttentionConfig) -> Any:
    """The work list of llama's 32 query and 8 kv heads, by NumPy."""
    return api.make_plan(
        start, length, num_tokens=tokens, heads=32, kv_heads=8, config=tiles,
        num_sms=device.num_sms(),
    )  # fmt: skip


def speeds(budget: float) -> None:
    plan: list[tuple[str, Callable[[], dict[str, Any]]]] = [("device copy", copy_speed)]
    two = AttentionConfig(1, 64, 2, 2)
    for batch, context in ((32, 4096), (128, 4096), (8, 32768), (1, 32768), (256, 1024)):
        name = f"decode batch {batch} context {context}"
        plan.append((name, lambda b=batch, c=context: decode_speed(b, c, 64, two)))
    deep = AttentionConfig(1, 64, 4, 1)
    plan.append(("decode 32x4096 one lane", lambda: decode_speed(32, 4096, 64, deep)))
    plan.append(("decode 32x4096 page 16", lambda: decode_speed(32, 4096, 16, two)))
    for tokens in (2048, 8192):
        plan.append((f"prefill {tokens}", lambda t=tokens: prefill_speed(t, False)))
        plan.append((f"prefill {tokens} cuDNN", lambda t=tokens: prefill_speed(t, True)))
    for count in (8, 128):
        for ours in (True, False):
            name = f"grouped 16384x4096x2048 experts {count} {'' if ours else 'ragged_dot'}"
            plan.append((name, lambda c=count, o=ours: grouped_speed(16384, 4096, 2048, c, o)))
    for swap in (True, False):
        name = f"experts 128 decode {'swapped' if swap else '64 rows'}"
        plan.append((name, lambda s=swap: expert_decode_speed(s)))
    for tokens in (16, 2048):
        for backend in ("mosaic", "xla"):
            name = f"fp8 4096x14336 tokens {tokens} {backend}"
            plan.append((name, lambda t=tokens, b=backend: fp8_speed(t, b)))
    for batch in (1, 32, 256):
        plan.append(
            (f"llama 8B decode loop batch batch {batch}", lambda b=batch: step_speed(b, 1024))
        )
    for name, measure in plan:
        if time.monotonic() - START > budget:
            RESULTS["skipped"].append(name)
            continue
        speed(name, measure)
