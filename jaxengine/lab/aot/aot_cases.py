"""Every kernel at a given shape as something to compile, and a process that compiles a list.

    python -m jaxengine.lab.aot.aot_cases < cases.json

reads [{"op": ..., "target": ..., keyword arguments of the op's function below}, ...] and prints
one JSON object a line as each is done: the report's figures, or "error". Run it by `compile_all`,
which sets the environment, or with that of `aot.worker_env`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxengine.lab.aot import aot

Case = dict[str, Any]
Job = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]  # function, arguments, donated


def paged_attention(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int = 64,
    tokens: int = 64,
    rows: int = 64,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    fp8: bool = False,
    config: dict[str, Any] | None = None,
) -> Job:
    """The whole call: packing, plan on the device, kernel, combination."""
    import jax.numpy as jnp

    from jaxengine.pallas_kernels.paged_attention import api
    from jaxengine.pallas_kernels.paged_attention.config import AttentionConfig

    chosen = AttentionConfig(**config) if config else None
    kv = jnp.float8_e4m3fn if fp8 else jnp.bfloat16
    args = [
        _array((tokens, heads, head_dim)),
        _array((1024, 2, kv_heads, page, head_dim), kv),
        _array((rows, 512), jnp.int32),
        _array((rows + 1,), jnp.int32),
        _array((rows,), jnp.int32),
        _array((heads,), jnp.float32),
        _array((kv_heads, 2), jnp.float32),
    ]

    def run(q: Any, cache: Any, table: Any, start: Any, length: Any, sink: Any, scale: Any) -> Any:
        return api.paged_attention(
            q,
            cache,
            table,
            start,
            length,
            scale=float(head_dim**-0.5),
            window=window,
            soft_cap=soft_cap,
            sinks=sink if sinks else None,
            kv_scales=scale if fp8 else None,
            config=chosen,
            backend="auto",
            num_sms=132,
            interpret=None,
        )

    return run, tuple(args), ()


def mla_attention(*, heads: int, latent: int = 512, rope: int = 64, tokens: int = 64) -> Job:
    import jax.numpy as jnp

    from jaxengine.pallas_kernels.mla_attention import mla_attention as call

    args = (
        _array((tokens, heads, latent + rope)),
        _array((512, 64, latent + rope)),
        _array((tokens, 512), jnp.int32),
        _array((tokens + 1,), jnp.int32),
        _array((tokens,), jnp.int32),
    )

    def run(*a: Any) -> Any:
        return call(*a, scale=0.07, latent=latent, backend="auto", num_sms=132)

    return run, args, ()


def moe(
    *,
    experts: int,
    width: int,
    inner: int,
    rows: int,
    gated: bool,
    activation: str = "silu",
    bias: bool = False,
    config: dict[str, Any] | None = None,
) -> Job:
    """One grouped product: gate/up with its activation, or down."""
    import jax.numpy as jnp

    from jaxengine.pallas_kernels.moe import MoeConfig, grouped_matmul

    chosen = MoeConfig(**config) if config else None
    shape = (experts, 2 * inner, width) if gated else (experts, width, inner)
    args = (
        _array((rows, width if gated else inner)),
        _array(shape),
        _array((experts,), jnp.int32),
        _array((experts,), jnp.int32),
        _array((experts, shape[1]), jnp.float32),
    )

    def run(x: Any, w: Any, starts: Any, counts: Any, b: Any) -> Any:
        more: dict[str, Any] = {"bias": b if bias else None}
        more |= {"activation": activation if gated else "", "config": chosen}
        return grouped_matmul(x, w, starts, counts, backend="auto", num_sms=132, **more)

    return run, args, ()


def quant_matmul(
    *,
    kind: str,
    outputs: int,
    inputs: int,
    tokens: int = 16,
    grouped: bool = False,
    backend: str = "auto",
    config: dict[str, Any] | None = None,
) -> Job:
    import jax.numpy as jnp

    from jaxengine.pallas_kernels.quant_matmul import QuantWeight
    from jaxengine.pallas_kernels.quant_matmul import quant_matmul as call
    from jaxengine.pallas_kernels.quant_matmul.config import Fp8Config, QuantConfig

    narrow = kind == "fp8"
    chosen = (Fp8Config if narrow else QuantConfig)(**config) if config else None
    packed = inputs // 2 if kind == "int4" else inputs
    types = {"int4": jnp.uint8, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
    data = _array((outputs, packed), types[kind])
    scale = _array((outputs, inputs // 128 if grouped else 1), jnp.float32)

    def run(x: Any, weight: Any) -> Any:
        return call(x, weight, config=chosen, backend=backend, num_sms=132)

    return run, (_array((tokens, inputs)), QuantWeight(data, scale)), ()


def kv_write(
    *, kv_heads: int, head_dim: int, page: int = 64, tokens: int = 64, fp8: bool = False
) -> Job:
    import jax.numpy as jnp

    from jaxengine.pallas_kernels.kv_write.api import write_kv

    kv = jnp.float8_e4m3fn if fp8 else jnp.bfloat16
    new = _array((tokens, kv_heads, head_dim))
    angle = _array((tokens, head_dim // 2), jnp.float32)
    args = (
        _array((256, 2, kv_heads, page, head_dim), kv),
        new,
        new,
        _array((tokens,), jnp.int32),
        angle,
        angle,
        _array((kv_heads, 2), jnp.float32),
    )

    def run(cache: Any, k: Any, v: Any, slots: Any, cos: Any, sin: Any, scales: Any) -> Any:
        more = {"kv_scales": scales} if fp8 else {}
        return write_kv(cache, k, v, slots, cos=cos, sin=sin, backend="auto", **more)

    return run, args, (0,)


def block_copy(*, gather: bool, kv_heads: int = 8, page: int = 64, head_dim: int = 128) -> Job:
    import jax.numpy as jnp

    from jaxengine.pallas_kernels.block_copy import gather_blocks, scatter_blocks

    shape = (2, kv_heads, page, head_dim)
    cache, ids = _array((256, *shape)), _array((16,), jnp.int32)
    if gather:
        return (lambda c, i: gather_blocks(c, i, backend="mosaic")), (cache, ids), ()

    def run(c: Any, i: Any, b: Any) -> Any:
        return scatter_blocks(c, i, b, backend="mosaic")

    return run, (cache, ids, _array((16, *shape))), (0,)


def step(*, shape: dict[str, Any], tokens: int, rows: int, blocks: int, page: int = 64) -> Job:
    """A whole single-device step of a dense model."""
    import jax.numpy as jnp

    from jaxengine.lab.aot import decode_step as ds
    from jaxengine.pallas_kernels.paged_attention.config import default_config

    s = ds.StepShape(**shape)
    per_row = -(-tokens // rows)
    config = default_config(s.head_dim, per_row, s.heads // s.kv_heads)
    ints = [(tokens,), (tokens,), (tokens,), (rows, 512), (rows + 1,), (rows,)]
    args = (s.params(), s.cache(blocks, page), *(_array(i, jnp.int32) for i in ints))

    def run(*a: Any) -> Any:
        return ds.step(*a, shape=s, config=config, num_sms=132, backend="auto")

    return run, args, (1,)


OPS: dict[str, Callable[..., Job]] = {
    f.__name__: f
    for f in (paged_attention, mla_attention, moe, quant_matmul, kv_write, block_copy, step)
}


def _array(shape: tuple[int, ...], dtype: Any = None) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, dtype or jnp.bfloat16)


def compile_case(case: Case) -> dict[str, Any]:
    """Report of one case, with `copies` (of a donated array in the program), `captured` (kernels
    lie in a command buffer) and `reasons` (why a call runs in XLA)."""
    from jaxengine.pallas_kernels import device

    target = case.get("target", "h200")
    device.log.setLevel(logging.INFO)
    device.assume(f"{aot.TARGETS[target].major}.{aot.TARGETS[target].minor}")
    how = {k: v for k, v in case.items() if k not in ("op", "target", "name")}
    run, args, donate = OPS[case["op"]](**how)
    reasons: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reasons.append(record.getMessage())  # type: ignore[method-assign]
    device.log.addHandler(handler)
    try:
        report = aot.compile_for(target, run, args, donate=donate)
    finally:
        device.log.removeHandler(handler)
    donated = [args[i] for i in donate]
    shapes = ["[" + ",".join(map(str, d.shape)) + "]" for d in donated]
    lines = [line for line in report.hlo.splitlines() if " copy(" in line or " copy-start(" in line]
    return {
        **report.as_dict(),
        "copies": sum(any(s in line for s in shapes) for line in lines),
        "captured": "kCommandBuffer" in report.thunks,
        "reasons": reasons,
    }


def compile_all(cases: Sequence[Case], *, timeout: float = 600) -> Iterator[dict[str, Any]]:
    """Each case with its figures or "error", compiled in a process of its own: aot.in_processes."""
    return aot.in_processes("jaxengine.lab.aot.aot_cases", cases, timeout=timeout)


if __name__ == "__main__":
    aot.answer(compile_case)
