"""`jaxengine bench kernels`: each device operation beside the roofline of this device.

Every implementation that the device runs: XLA anywhere, the Mosaic kernels on the GPUs they are
for. The floor is the larger of bytes / memory rate and FLOPs / product rate, both rates measured
in the same run; share is how much of it is reached (above 100 %: the caches hold the operands).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from jaxengine import platform
from jaxengine.lab.bench import results
from jaxengine.lab.bench.flags import add_output, new_parser, positive

OP_NAMES = ("decode", "prefill", "latent", "write", "experts", "matmul", "copy")
ROW_KEYS = ("op", "implementation")
_DEFAULTS = {
    "rows": (8, "sequences that decode"),
    "context": (512, "tokens of KV of each"),
    "tokens": (256, "of a prompt"),
    "heads": (9, "query heads"),
    "kv_heads": (3, "heads of keys and values"),
    "head_dim": (64, "width of a head"),
    "block_size": (16, "tokens of a block"),
    "hidden": (512, "width of the model"),
    "ffn": (1536, "inner width of an MLP or expert"),
    "experts": (8, "number of experts"),
    "top_k": (2, "experts of a token"),
}


def main(argv: list[str]) -> int:
    """Run the bench; prints a row an implementation. Raises ValueError for sizes that cannot be."""
    args = parser().parse_args(argv)
    if args.heads % args.kv_heads:
        raise ValueError(f"--heads {args.heads} is no multiple of --kv-heads {args.kv_heads}")
    if args.top_k > args.experts:
        raise ValueError(f"--top-k {args.top_k} is more than --experts {args.experts}")
    platform.setup()
    from jaxengine.lab.bench.kernel_cases import OPS, Sizes
    from jaxengine.lab.bench.machine import measure

    machine = measure()
    names = {field.name for field in dataclasses.fields(Sizes)}
    sizes = Sizes(**{k: v for k, v in vars(args).items() if k in names and v is not None})
    products = machine.gflops_float32 if args.dtype == "float32" else machine.gflops
    print(f"{machine.name}: {products:.0f} GFLOP/s, {machine.gbytes:.1f} GB/s; {args.dtype}")
    print(
        f"{'op':<9}{'implementation':<20}{'us':>10}{'floor us':>10}{'share':>8}{'GB/s':>9}"
        f"{'GFLOP/s':>10}  bound"
    )
    rows: list[dict[str, Any]] = []
    for op in args.ops:
        for case in OPS[op](sizes):
            try:
                seconds = timed(case.run, case.args, case.donate, args.repeat)
            except ValueError as error:  # a kernel that does not take these sizes says why
                print(f"{case.op:<9}{case.implementation:<20}{error}")
                continue
            rows.append({"op": case.op, "implementation": case.implementation})
            rows[-1] |= roofline(case.flops, case.nbytes, seconds, products, machine.gbytes)
            _print(rows[-1])
    if args.output_json:
        content = results.result("kernels", args, machine.to_dict(), {"rows": rows}, ROW_KEYS)
        results.save(args.output_json, content)
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("kernels", __doc__)
    add = made.add_argument
    add("--ops", nargs="+", choices=OP_NAMES, default=list(OP_NAMES), help="operations to time")
    for name, (default, text) in _DEFAULTS.items():
        add("--" + name.replace("_", "-"), type=positive, default=default, help=text)
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of operands")
    add("--repeat", type=positive, default=10, help="calls of each; the fastest counts")
    add_output(made)
    return made


def roofline(
    flops: float, nbytes: float, seconds: float, gflops: float, gbytes: float
) -> dict[str, Any]:
    """Times in microseconds, rates, the share of the floor, and which of the two binds."""
    compute, memory = flops / (gflops * 1e9), nbytes / (gbytes * 1e9)
    floor = max(compute, memory)
    return {
        "us": 1e6 * seconds,
        "floor_us": 1e6 * floor,
        "share": floor / seconds,
        "flops": flops,
        "bytes": nbytes,
        "gflops_per_s": flops / seconds / 1e9,
        "gbytes_per_s": nbytes / seconds / 1e9,
        "bound": "compute" if compute > memory else "memory",
    }


def timed(
    run: Callable[..., Any], args: tuple[Any, ...], donate: tuple[int, ...], repeat: int
) -> float:
    """Seconds of the fastest call. Donated arguments are those that the result replaces."""
    import jax

    call = jax.jit(run, donate_argnums=donate).lower(*args).compile()
    given, best = list(args), float("inf")
    for turn in range(repeat + 1):
        began = time.perf_counter()
        out = jax.block_until_ready(call(*given))
        if turn:  # the first touches memory for the first time
            best = min(best, time.perf_counter() - began)
        for at, value in zip(donate, out if isinstance(out, tuple) else (out,), strict=False):
            given[at] = value
    return best


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['op']:<9}{row['implementation']:<20}{row['us']:>10.1f}{row['floor_us']:>10.1f}"
        f"{row['share']:>8.0%}{row['gbytes_per_s']:>9.2f}{row['gflops_per_s']:>10.1f}"
        f"  {row['bound']}",
        flush=True,
    )
