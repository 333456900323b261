"""The aot-check command: what a model needs on GPUs, told by the compiler without a GPU.

Compiles the engine's own steps for one or several devices of the target, and works out from the
figures how many KV blocks memory holds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxengine.lab.aot import aot

DECODE_ROWS = (1, 64, 256)
MIXED_TOKENS = 2048
MESH_LAYERS = 6  # compiled for several devices: all of a large model take long, and repeat
STEP_BLOCKS = 1024  # blocks of the compiled step's cache; temporaries do not depend on it
GIB = 1 << 30


@dataclass(frozen=True)
class Mesh:
    """Settings as of `ParallelConfig`."""

    tensor_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    all2all_backend: str = "auto"
    enable_dbo: bool = False

    @property
    def devices(self) -> int:
        return self.tensor_parallel_size * self.attention_data_parallel_size


def read_config(model: str) -> dict[str, Any]:
    """config.json of a folder, or that file itself. Raises ValueError naming what is wrong."""
    from jaxengine.weights.resolve import read_json

    path = Path(model)
    return read_json(path / "config.json" if path.is_dir() else path)


def cases(
    config: dict[str, Any], target: str, block_size: int, mesh: Mesh, layers: int = 0
) -> list[dict[str, Any]]:
    """The steps to compile: decode, mixed, and on request the same as two microbatches.

    `layers`: only the first so many; 0 = all on one device, MESH_LAYERS on several.
    """
    settings = {k: getattr(mesh, k) for k in Mesh.__dataclass_fields__}
    settings["layers"] = layers or (MESH_LAYERS if mesh.devices > 1 else 0)
    shapes = [(rows, rows, True) for rows in DECODE_ROWS] + [(MIXED_TOKENS, 256, False)]
    if mesh.devices > 1:  # each takes a minute: the largest of both kinds
        shapes = shapes[-2:]
    found = []
    for tokens, rows, decode_only in shapes:
        kind = "decode" if decode_only else "mixed"
        shape = {"tokens": tokens, "rows": rows, "decode_only": decode_only, "dbo": False}
        case = {"config": config, "target": target, "blocks": STEP_BLOCKS, **settings, **shape}
        case |= {"block_size": block_size, "name": f"{kind} step of {tokens} tokens"}
        found.append(case)
        if mesh.enable_dbo:
            found.append({**case, "dbo": True, "name": f"{case['name']}, two halves"})
    return found


def describe(report: dict[str, Any]) -> tuple[list[str], bool]:
    """Lines about a compiled step, and whether it is as it should be."""
    name = f"{report['name']:38}"
    if "error" in report:
        return [f"{name}FAILED: {report['error']}"], False
    kernels = report["kernels"]
    what = f"temp {report['temp'] / GIB:6.2f} GiB"
    good = not report["copies"]
    if kernels:
        spills = sum(k["spill_bytes"] for k in kernels)
        registers = max(k["registers"] for k in kernels)
        shared = max(k["shared"] for k in kernels)
        what += f"  registers {registers}  shared {shared / 1024:.0f} KiB  spills {spills}"
        good &= spills == 0
    else:
        what += "  XLA (no Hopper kernel for this model or target)"
    what += f"  {report['copies']} copies!" if report["copies"] else "  cache in place"
    lines = [f"{name}{what}"]
    if "collectives" in report:
        lines.append("    " + collectives(report))
    if report["dbo"]:
        lines.append("    " + overlap(report["pairs"]))
    return lines, good


def collectives(report: dict[str, Any]) -> str:
    """How many of each collective in a layer, and the largest."""
    layers = report["layers"]
    counts = [f"{n} {op} ({n / layers:.1f} a layer)" for op, n in report["collectives"].items()]
    largest = max((pair["bytes"] for pair in report["pairs"]), default=0)
    return f"{', '.join(counts) or 'no collectives'}; the largest moves {largest / 2**20:.1f} MiB"


def overlap(pairs: list[dict[str, Any]]) -> str:
    """How many exchanges have matrix products of the other half beside them."""
    exchanges = [p for p in pairs if p["op"] not in ("all-reduce", "collective-permute")]
    beside = sum(p["flops_between"] > 0 for p in exchanges)
    share = 100 * beside / len(exchanges) if exchanges else 0.0
    return f"{beside} of {len(exchanges)} exchanges overlap matrix products ({share:.0f} %)"


def run_aot_check(
    model: str,
    target: str = "h200",
    *,
    block_size: int = 64,
    memory_utilization: float = 0.92,
    json_output: bool = False,
    mesh: Mesh | None = None,
    layers: int = 0,
) -> int:
    """Print the report of a model folder or config.json; 1 when something does not compile as it
    should or does not fit, 2 when nothing can be said."""
    from jaxengine.lab.aot.aot_step import compile_steps
    from jaxengine.models.families import spec_from_config

    if target not in aot.TARGETS:
        print(f"target must be one of {', '.join(aot.TARGETS)}, not {target!r}", file=sys.stderr)
        return 2
    mesh = mesh or Mesh()
    try:
        config = read_config(model)
        num_layers = spec_from_config(config).num_layers
        reports = list(compile_steps(cases(config, target, block_size, mesh, layers)))
    except (ValueError, RuntimeError) as e:
        print(e, file=sys.stderr)
        return 2
    compiled = [r for r in reports if "error" not in r]
    temp = max((r["temp"] for r in compiled), default=0)
    weights = compiled[0]["weights"] if compiled else 0
    block = 0
    if compiled:
        block = compiled[0]["cache_bytes"] // STEP_BLOCKS * num_layers // compiled[0]["layers"]
    usable = int(aot.TARGETS[target].memory * memory_utilization)
    blocks = max(0, (usable - weights - temp) // block) if block else 0
    described = [describe(r) for r in reports]
    good = all(ok for _, ok in described) and blocks > 0
    if json_output:
        summary = {"weights": weights, "temp": temp, "block_bytes": block, "blocks": blocks}
        told = [{k: v for k, v in r.items() if k != "config"} for r in reports]
        print(json.dumps({"target": target, **summary, "cases": told}, indent=1))
        return 0 if good else 1
    print(f"{model} on {mesh.devices} x {aot.TARGETS[target].name}; figures of one device")
    if compiled and compiled[0]["layers"] < num_layers:
        print(f"  (compiled: {compiled[0]['layers']} of {num_layers} layers; memory is of all)")
    for lines, _ in described:
        print("\n".join("  " + line for line in lines))
    if mesh.enable_dbo:
        _print_gain(config, mesh)
    print(f"  weights {weights / GIB:.2f} GiB, largest temporary {temp / GIB:.2f} GiB")
    print(f"  usable memory {usable / GIB:.2f} GiB, one KV block {block / 1024:.0f} KiB")
    if blocks:
        shards = mesh.attention_data_parallel_size
        print(f"  {blocks} KV blocks: {blocks * block_size * shards} tokens of context in all")
    else:
        print("  does not fit: no memory is left for the KV cache")
    return 0 if good else 1


def _print_gain(config: dict[str, Any], mesh: Mesh) -> None:
    """What the cost model expects of dual-batch overlap, and the thresholds that follow."""
    from jaxengine.models.families import spec_from_config
    from jaxengine.parallel.cost import MoeShape, describe

    spec = spec_from_config(config)
    if spec.moe is None:
        return
    moe = spec.moe
    shape = MoeShape(
        spec.hidden_size, moe.ffn_size, moe.num_experts, moe.top_k,
        spec.num_heads, spec.num_kv_heads, spec.head_dim,
    )  # fmt: skip
    print("  predicted by the cost model (docs/parallel.md):")
    print("\n".join("    " + line for line in describe(mesh.devices, shape=shape).splitlines()))
