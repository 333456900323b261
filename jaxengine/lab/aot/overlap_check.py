"""Compile a mixture-of-experts step for 8 H200s and see what runs beside its exchanges.

    python -m jaxengine.lab.aot.overlap_check < cases.jsonl

reads one case a line and prints one report a line; `report` runs it in a process of its own, with
the environment of `aot.worker_env`. What is compiled is the product's exchange, expert and overlap
code in a decoder of plain attention; nothing is executed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from jaxengine.lab.aot import aot, hlo
from jaxengine.parallel.cost import H200, QWEN3_30B_A3B, MoeShape
from jaxengine.platform import xla_flags

FLAGS = tuple(f"--{name}={value}" for name, value in xla_flags(8).items())


@dataclass(frozen=True)
class Case:
    """One program: `tokens` a device, with microbatches or without, on `devices` devices."""

    tokens: int
    dbo: bool
    layers: int = 3
    devices: int = 8
    backend: str = "all_to_all"
    shape: MoeShape = QWEN3_30B_A3B


def build(case: Case) -> tuple[Any, tuple[Any, ...]]:
    """The step as a function of one shard_map, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxengine.pallas_kernels.moe import route
    from jaxengine.parallel import exchange, experts, overlap

    s, t = case.shape, case.tokens
    mesh = topologies.make_mesh(aot.topology("h200", case.devices), (case.devices,), ("x",))
    shards = exchange.ExpertShards(("x",), case.devices, s.experts // case.devices)
    heads, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    options = experts.ExpertOptions()
    cut = overlap.split_tokens(t, t) if case.dbo else t
    starts = (0, cut)

    def linear(x: Any, w: Any) -> Any:
        return jnp.einsum("td,od->to", x, w, preferred_element_type=jnp.float32).astype(x.dtype)

    def norm(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True))).astype(x.dtype)

    def attend(q: Any, cache: Any, start: int) -> Any:
        # Plain causal attention over the tokens so far: what matters here are its products.
        count, until = q.shape[0], start + q.shape[0]
        q = q.reshape(count, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
        k, v = (a[:until].reshape(until, s.kv_heads, s.head_dim) for a in cache)
        scores = jnp.einsum("tgqc,sgc->gqts", q, k, preferred_element_type=jnp.float32)
        causal = jnp.arange(until)[None] <= start + jnp.arange(count)[:, None]
        scores = jnp.where(causal, scores / math.sqrt(s.head_dim), -jnp.inf)
        p = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("gqts,sgc->tgqc", p, v).reshape(count, heads)

    def layer(w: dict[str, Any]) -> overlap.ExpertLayer:
        held = experts.ExpertWeights(w["gate_up"], w["down"])

        def plan(count: int) -> exchange.ExchangePlan:
            return exchange.make_plan(
                count, s.top_k, s.width, s.itemsize, shards, case.backend, count
            )

        def attend_layer(half: int, x: Any, cache: Any) -> Any:
            start = starts[half]
            qkv = linear(norm(x), w["qkv"])
            q, k, v = jnp.split(qkv, [heads, heads + kv], axis=-1)
            cache = tuple(
                jax.lax.dynamic_update_slice_in_dim(a, b, start, 0)
                for a, b in zip(cache, (k, v), strict=True)
            )
            return x + linear(attend(q, cache, start), w["o"]), cache

        def pack(x: Any) -> Any:
            h = norm(x)
            weights, ids = route(linear(h, w["router"]), s.top_k)
            packed = exchange.pack(plan(x.shape[0]), h, ids, weights)
            return (x, packed), packed.payload

        def send(kept: Any, payload: Any) -> Any:
            x, packed = kept
            return exchange.send(plan(x.shape[0]), packed._replace(payload=payload))

        def run(kept: Any, came: Any) -> Any:
            received = exchange.unpack(plan(kept[0].shape[0]), came, s.width, kept[0].dtype)
            return experts.compute(received, held, options), received

        def give_back(kept: Any, rows: Any) -> Any:
            return exchange.give_back(plan(kept[0].shape[0]), *rows)

        def after(kept: Any, back: Any) -> Any:
            x, packed = kept
            return x + exchange.combine(plan(x.shape[0]), back, packed)

        return overlap.ExpertLayer(attend_layer, pack, send, run, give_back, after)

    def step(x: Any, weights: Any, caches: Any) -> Any:
        layers = [layer(w) for w in weights]
        if not case.dbo:
            return overlap.run_whole(layers, x, caches)
        halves, caches = overlap.interleave(layers, (x[:cut], x[cut:]), caches)
        return jnp.concatenate(halves), caches

    def shape(spec: tuple[Any, ...], *dims: int) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=sharding)

    weights = [
        {
            "qkv": shape((), heads + 2 * kv, s.width),
            "o": shape((), s.width, heads),
            "router": shape((), s.experts, s.width),
            "gate_up": shape(("x",), s.experts, 2 * s.inner, s.width),
            "down": shape(("x",), s.experts, s.width, s.inner),
        }
        for _ in range(case.layers)
    ]
    specs = [
        {k: PartitionSpec("x" if k in ("gate_up", "down") else None) for k in w} for w in weights
    ]
    everyone = case.devices * t
    caches = [tuple(shape(("x",), everyone, kv) for _ in "kv") for _ in range(case.layers)]
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(PartitionSpec("x"), specs, PartitionSpec("x")),
        out_specs=PartitionSpec("x"), check_vma=False,
    )  # fmt: skip
    return mapped, (shape(("x",), everyone, s.width), weights, caches)


def compile_case(case: Case) -> dict[str, Any]:
    """Compile, and read the schedule. Runs in a process with `aot.worker_env`."""
    from jaxengine.pallas_kernels import device

    device.assume("9.0")
    fn, args = build(case)
    text = aot.compile_for("h200", fn, args, donate=(2,), devices=case.devices).hlo
    half = -(-case.tokens // 2) if case.dbo else case.tokens

    def expected(call: hlo.Instruction, operands: list[hlo.Shape]) -> float | None:
        # The kernel's table has room for the worst case; count the rows of evenly spread tokens.
        most = hlo.expert_kernel_flops(call, operands)
        return most and most * half * case.shape.top_k / operands[0][1][0]

    return summary(hlo.overlap_report(text, expected), case.devices)


def summary(pairs: list[hlo.Pair], devices: int) -> dict[str, Any]:
    """Shares of the exchanges that have products beside them, and of their time that is covered.

    `pairs` and `overlapped` count exchanges (dispatch and combine); `share` is their quotient.
    `hidden` is the part of the exchanges' predicted time during which products run.
    """
    pairs = [p for p in pairs if p.op not in ("all-reduce", "collective-permute")]
    needed = [H200.latency + p.bytes * (devices - 1) / devices / H200.link for p in pairs]
    beside = [p.flops_between / (H200.flops * H200.best_share) for p in pairs]
    overlapped = sum(p.flops_between > 0 for p in pairs)
    hidden = sum(min(a, b) for a, b in zip(needed, beside, strict=True))
    return {
        "pairs": len(pairs),
        "overlapped": overlapped,
        "share": overlapped / len(pairs) if pairs else 0.0,
        "hidden": hidden / sum(needed) if pairs else 0.0,
        "collectives": [asdict(p) for p in pairs],
    }


def compile_cases(
    cases: list[Case], *, flags: tuple[str, ...] = FLAGS, timeout: float = 300
) -> list[dict[str, Any]]:
    """Reports of cases, compiled in one process with these XLA flags.

    Raises RuntimeError when nothing can be compiled here or the compiler fails.
    """
    if reason := aot.missing():
        raise RuntimeError(reason)
    with aot.dump_folder() as folder:
        env = aot.worker_env(folder)
        env["XLA_FLAGS"] = " ".join([env["XLA_FLAGS"], *flags])
        done = subprocess.run(
            [sys.executable, "-m", "jaxengine.lab.aot.overlap_check"],
            input="\n".join(json.dumps(asdict(c)) for c in cases),
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(lines) != len(cases):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"compiling for H200s failed: {last}")
    return lines


def report(
    shape: MoeShape, dbo: bool, tokens: int, devices: int, *, layers: int = 3
) -> dict[str, Any]:
    """What runs beside the exchanges of a step of `tokens` tokens a device; see `summary`.

    Raises ValueError where the sizes do not fit and RuntimeError as `compile_cases` does.
    """
    if tokens < 2 or shape.experts % devices:
        raise ValueError(
            f"need two tokens or more (got {tokens}) and experts that divide by the devices "
            f"({shape.experts} over {devices})"
        )
    return compile_cases([Case(tokens, dbo, layers, devices, shape=shape)])[0]


def main() -> int:
    for line in sys.stdin:
        raw = json.loads(line)
        case = Case(**{**raw, "shape": MoeShape(**raw["shape"])})
        print(json.dumps(compile_case(case)), flush=True)
    os._exit(0)  # the plugin has no device to shut down


if __name__ == "__main__":
    main()
