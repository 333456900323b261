"""Every kernel on a real Hopper GPU: right answers, no races, and how fast. One command:

    python tests/gpu/device_check.py [OUT.json] [--seconds 330]

from the repository's root, with only jax, jaxtyping and numpy installed. Outputs are checked
against float64 on the host with NaN in all memory that nobody owns, each kernel is repeated and
its bits compared (a race shows as a changed bit), then speeds are measured beside a device copy,
cuDNN's attention and lax.ragged_dot in the same run, and decode steps of a random llama of 8B.
Writes JSON and prints a table; the exit status is 1 if any answer was wrong. Parts that do not
fit the time are named, not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels")]
# The suite's test helpers need hypothesis and pytest; the check itself uses neither.
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from attention_cases import Case, build, f64, relative  # noqa: E402

from jaxengine.pallas_kernels import decode_step, device, moe  # noqa: E402
from jaxengine.pallas_kernels.block_copy import gather_blocks, scatter_blocks  # noqa: E402
from jaxengine.pallas_kernels.kv_write.api import write_kv  # noqa: E402
from jaxengine.pallas_kernels.mla_attention import mla_attention  # noqa: E402
from jaxengine.pallas_kernels.paged_attention import api  # noqa: E402
from jaxengine.pallas_kernels.paged_attention.config import (  # noqa: E402
    AttentionConfig,
    default_config,
)
from jaxengine.pallas_kernels.quant_matmul import quant_matmul, quantise  # noqa: E402
from jaxengine.pallas_kernels.quant_matmul.reference import (  # noqa: E402
    dequantise,
    quantise_tokens,
)

REPEATS = 10
CHECK_SECONDS = 210.0  # checks that would start later are skipped, to leave time for speeds
START = time.monotonic()
RESULTS: dict[str, Any] = {"correct": [], "speed": [], "skipped": []}


def record(kind: str, name: str, **figures: Any) -> None:
    RESULTS[kind].append({"name": name, **figures})
    text = "  ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()
    )
    print(f"{time.monotonic() - START:6.1f}s {kind:8}{name:46}{text}", flush=True)


def check(name: str, run: Callable[[], Any], want: np.ndarray, limit: float) -> None:
    """Compare with float64, then repeat and compare bits."""
    if time.monotonic() - START > CHECK_SECONDS:
        RESULTS["skipped"].append(name)
        return
    try:
        first = np.asarray(jax.block_until_ready(run()))
        error = relative(first, want)
        same = all(np.array_equal(first, np.asarray(run())) for _ in range(REPEATS))
        record("correct", name, error=error, same_bits=same, ok=bool(error < limit and same))
    except Exception as e:  # noqa: BLE001 - one broken kernel must not hide the others
        record("correct", name, ok=False, failure=f"{type(e).__name__}: {str(e)[:300]}")


def timed(run: Callable[..., Any], *args: Any, loops: int = 20) -> float:
    """Median seconds of a call, launched back to back in groups of `loops`."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        out = None
        for _ in range(loops):
            out = run(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / loops)
    return float(np.median(times))


def speed(name: str, measure: Callable[[], dict[str, Any]]) -> None:
    try:
        record("speed", name, **measure())
    except Exception as e:  # noqa: BLE001 - as in check
        record("speed", name, failure=f"{type(e).__name__}: {str(e)[:300]}")


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


def main() -> int:
    parser = argparse.ArgumentParser(description="check the kernels on this GPU")
    parser.add_argument("out", nargs="?", default="device_check.json")
    parser.add_argument("--seconds", type=float, default=330)
    options = parser.parse_args()
    if reason := device.device_reason():
        print(f"nothing to check: {reason}", file=sys.stderr)
        return 2
    RESULTS["device"] = jax.devices()[0].device_kind
    RESULTS["versions"] = {"jax": jax.__version__, "numpy": np.__version__}
    RESULTS["versions"]["engine"] = importlib.util.find_spec("msgspec") is not None
    correctness()
    speeds(options.seconds)
    wrong = [c["name"] for c in RESULTS["correct"] if not c["ok"]]
    RESULTS["seconds"] = time.monotonic() - START
    pathlib.Path(options.out).write_text(json.dumps(RESULTS, indent=1) + "\n")
    print(f"{len(RESULTS['correct']) - len(wrong)} right, {len(wrong)} wrong: {wrong}")
    print(f"skipped for time: {RESULTS['skipped']}; written to {options.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
