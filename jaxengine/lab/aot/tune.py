"""Writes the tables of configurations: `python -m jaxengine.lab.aot.tune configs/h200`.

Candidates are listed for every key; those that spill or overflow are dropped by compiling them;
the rest keep the heuristic's order until a GPU has measured them.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jaxengine.lab.aot.aot_cases import compile_all
from jaxengine.pallas_kernels.moe.config import MoeConfig, default_config


def candidates(op: str) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(key, arguments of the AOT case, config) of everything worth trying, best guess first."""
    found: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    if op == "paged_attention":
        for dim, (heads, kv_heads), tokens in itertools.product(
            (64, 128, 256), ((32, 8), (64, 8)), (1, 512)
        ):
            if dim == 256 and heads == 64:
                continue
            group = heads // kv_heads
            key = {"head_dim": dim, "group": group, "page": 64, "kv": "bfloat16"}
            key["tokens_per_row_bucket"] = tokens
            rows = 64 if tokens == 1 else 4
            case = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
            case |= {"tokens": rows * tokens, "rows": rows}
            for wgs, block, stages, lanes in _attention_tiles(dim, tokens):
                config = dict(compute_wgs=wgs, block_kv=block, stages=stages, lanes=lanes)
                found.append((key, case, config))
    elif op == "moe":
        for shape, gated, mean in itertools.product(MOE_SHAPES, (True, False), (8, 512)):
            key = {"width": shape["width"], "inner": shape["inner"], "gated": gated}
            key |= {"dtype": "bfloat16", "rows_per_expert_bucket": mean}
            case = {**shape, "gated": gated, "rows": shape["experts"] * mean}
            sizes = (shape["inner"], shape["width"])
            columns, depth = sizes if gated else sizes[::-1]
            for config in _moe_tiles(columns, depth, mean, gated):
                found.append((key, case, config))
    elif op == "quant_matmul":
        for kind, (outputs, inputs), tokens in itertools.product(
            ("int8", "int4", "fp8"), ((4096, 4096), (4096, 14336)), (16,)
        ):
            key = {"kind": kind, "outputs": outputs, "inputs": inputs, "tokens_bucket": tokens}
            case = dict[str, Any](kind=kind, outputs=outputs, inputs=inputs, tokens=tokens)
            more = {"compute_wgs": 2, "block_t": 16} if kind == "fp8" else {}
            for splits, stages in ((4, 6), (2, 8)):
                found.append((key, case, dict(splits=splits, stages=stages, **more)))
    else:
        raise ValueError(f"no candidates for {op!r}")
    return found


MOE_SHAPES: tuple[dict[str, Any], ...] = (
    {"experts": 128, "width": 2048, "inner": 768},  # Qwen3-30B-A3B
    {"experts": 32, "width": 7168, "inner": 2048},  # DeepSeek-V3 on eight devices
    {
        "experts": 32, "width": 2880, "inner": 2880,  # gpt-oss-20b
        "activation": "clamped_swiglu", "bias": True,
    },
)  # fmt: skip


def _moe_tiles(columns: int, depth: int, mean: int, gated: bool) -> list[dict[str, Any]]:
    """The heuristic's choice for this many rows an expert and one more."""
    first = default_config(mean, 1, columns, depth, gated)
    wide = 128 if columns % 128 == 0 else 64
    other = MoeConfig(1, wide, 64, 4) if mean <= 32 else MoeConfig(2, wide, 64, 3)
    return [asdict(first), asdict(other)]


def _attention_tiles(dim: int, tokens: int) -> list[tuple[int, int, int, int]]:
    if dim > 192:
        return [(1, 64, 2, 1)]
    if tokens == 1:
        return [(1, 64, 2, 2), (1, 64, 4, 1)]
    return [(2, 128, 2, 1), (2, 64, 3, 1)]


def generate(op: str, target: str = "h200") -> dict[str, Any]:
    """The table of an op, of candidates that compile without spills and within shared memory."""
    wanted = candidates(op)
    cases = [{"op": op, "target": target, **case, "config": c} for _, case, c in wanted]
    entries, dropped = [], []
    for (key, _, config), report in zip(wanted, compile_all(cases), strict=True):
        kernels = report.get("kernels", [])
        spills = sum(k["spill_bytes"] for k in kernels)
        if "error" in report or spills or not kernels:
            why = report.get("error") or f"{spills} bytes spilled"
            dropped.append({"key": key, "config": config, "why": why})
            continue
        worst = {n: max(k[n] for k in kernels) for n in ("registers", "spill_bytes", "shared")}
        versions = {"jax": jax.__version__}
        entries.append(
            {"key": key, "config": config, "us": None, "aot": worst, "versions": versions}
        )
    return {"op": op, "device": target, "entries": entries, "dropped": dropped}


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "configs/h200")
    for op in sys.argv[2:] or ("paged_attention", "moe", "quant_matmul"):
        table = generate(op, folder.name)
        text = json.dumps({**table, "entries": [], "dropped": []}, indent=1)
        lines = {n: ",\n  ".join(map(json.dumps, table[n])) for n in ("entries", "dropped")}
        for name, body in lines.items():
            text = text.replace(f'"{name}": []', f'"{name}": [\n  {body}\n ]')
        (folder / f"{op}.json").write_text(text + "\n")
        print(f"{op}: {len(table['entries'])} kept, {len(table['dropped'])} dropped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
