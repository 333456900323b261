"""The aot-check command: what a model needs on a GPU, told by the compiler without that GPU.

Compiles the model's kernels, and for dense models whole steps, to the target's machine code, and
works out from the figures how many KV blocks memory holds.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxengine.pallas_kernels import aot, aot_cases

DECODE_ROWS = (1, 64, 256)
MIXED_TOKENS = 2048
STEP_BLOCKS = 1024  # blocks of the compiled step's cache; temporaries do not depend on it
QUANTUM_ROWS = 64
GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """Of a decoder, from its config.json. kv_width: numbers of one token in one layer's cache."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    kv_width: int
    parameters: int
    experts: int = 0
    expert_ffn: int = 0
    top_k: int = 0
    latent: int = 0
    latent_rope: int = 0
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    qk_norm: bool = False


def read_config(model: str) -> dict[str, Any]:
    """config.json of a folder, or that file itself. Raises ValueError naming what is wrong."""
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as e:
        raise ValueError(f"{path} cannot be read: {e.strerror}") from e
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not an object")
    inner = config.get("text_config", config)
    return inner if isinstance(inner, dict) else config


def sizes(config: dict[str, Any]) -> Sizes:
    """Raises ValueError naming a field that is missing or no positive integer."""

    def need(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or value <= 0:
            raise ValueError(f"config.json: {name} must be a positive integer, got {value!r}")
        return value

    def maybe(*names: str) -> int:
        return next((int(config[n]) for n in names if config.get(n)), 0)

    layers, width, heads = (
        need("num_hidden_layers"),
        need("hidden_size"),
        need("num_attention_heads"),
    )
    kv_heads = maybe("num_key_value_heads") or heads
    dim = maybe("head_dim") or width // heads
    ffn, vocab = need("intermediate_size"), need("vocab_size")
    experts = maybe("n_routed_experts", "num_local_experts", "num_experts")
    expert_ffn = maybe("moe_intermediate_size") or (ffn if experts else 0)
    latent, rope = maybe("kv_lora_rank"), maybe("qk_rope_head_dim")
    if latent:
        nope, value, rank = need("qk_nope_head_dim"), need("v_head_dim"), maybe("q_lora_rank")
        q = heads * (nope + rope)
        attention = (width * rank + rank * q) if rank else width * q
        attention += width * (latent + rope) + latent * heads * (nope + value)
        attention += heads * value * width
        kv_width = latent + rope
    else:
        attention = (2 * heads + 2 * kv_heads) * dim * width
        kv_width = 2 * kv_heads * dim
    dense = layers if not experts else maybe("first_k_dense_replace")
    shared = maybe("n_shared_experts")
    mlp = dense * 3 * width * ffn
    mlp += (layers - dense) * 3 * width * expert_ffn * (experts + shared) if experts else 0
    mlp += (layers - dense) * width * experts
    tied = bool(config.get("tie_word_embeddings"))
    return Sizes(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        ffn=ffn,
        vocab=vocab,
        kv_width=kv_width,
        parameters=vocab * width * (1 if tied else 2) + layers * attention + mlp,
        experts=experts,
        expert_ffn=expert_ffn,
        top_k=maybe("num_experts_per_tok", "num_experts_per_token"),
        latent=latent,
        latent_rope=rope,
        window=maybe("sliding_window") if config.get("use_sliding_window", True) else 0,
        soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
        sinks=config.get("model_type") == "gpt_oss",
        qk_norm=str(config.get("model_type", "")).startswith("qwen3"),
    )


def cases(s: Sizes, target: str, block_size: int) -> list[dict[str, Any]]:
    """Kernels, then whole steps, to compile for a model."""
    found: list[dict[str, Any]] = []
    for tokens, rows in ((64, 64), (MIXED_TOKENS, 4)):
        phase = "decode" if tokens == rows else "prefill"
        if s.latent:
            case = {"op": "mla_attention", "heads": s.heads, "tokens": tokens}
            found.append({**case, "latent": s.latent, "rope": s.latent_rope})
        else:
            case = {"op": "paged_attention", "heads": s.heads, "kv_heads": s.kv_heads}
            case |= {"head_dim": s.head_dim, "page": block_size, "tokens": tokens, "rows": rows}
            case |= {"soft_cap": s.soft_cap, "sinks": s.sinks}
            for window in sorted({0, s.window}):
                found.append({**case, "window": window})
        for item in found:
            item.setdefault("name", f"attention {phase}")
    if s.experts:
        for tokens in (64, MIXED_TOKENS):
            rows = tokens * s.top_k + 7 * min(s.experts, tokens * s.top_k)
            rows = -(-rows // QUANTUM_ROWS) * QUANTUM_ROWS + QUANTUM_ROWS
            for gated in (True, False):
                case = {"op": "moe", "experts": s.experts, "width": s.width, "rows": rows}
                name = f"experts {'gate/up' if gated else 'down'}, {tokens} tokens"
                found.append({**case, "inner": s.expert_ffn, "gated": gated, "name": name})
    if not s.latent:
        case = {"op": "kv_write", "kv_heads": s.kv_heads, "head_dim": s.head_dim}
        found.append({**case, "page": block_size, "fp8": True, "name": "kv write, fp8"})
    if not (s.experts or s.latent or s.window or s.soft_cap or s.sinks):
        shape = {"vocab": s.vocab, "layers": s.layers, "width": s.width, "heads": s.heads}
        shape |= {"kv_heads": s.kv_heads, "head_dim": s.head_dim, "ffn": s.ffn}
        shape |= {"qk_norm": s.qk_norm}
        for tokens, rows in (*((r, r) for r in DECODE_ROWS), (MIXED_TOKENS, 64)):
            case = {"op": "step", "shape": shape, "tokens": tokens, "rows": rows}
            name = f"step of {tokens} tokens in {rows} rows"
            found.append({**case, "blocks": STEP_BLOCKS, "page": block_size, "name": name})
    return [{**case, "target": target} for case in found]


def describe(report: dict[str, Any]) -> tuple[str, bool]:
    """One line about a compiled case, and whether it is as it should be."""
    name = f"{report['name']:34}"
    if "error" in report:
        return f"{name}FAILED: {report['error']}", False
    kernels = report["kernels"]
    spills = sum(k["spill_bytes"] for k in kernels)
    what = f"temp {report['temp'] / GIB:6.2f} GiB"
    if not kernels:
        return f"{name}{what}  XLA (no Hopper kernel for this shape or target)", True
    registers = max(k["registers"] for k in kernels)
    shared = max(k["shared"] for k in kernels)
    what += f"  registers {registers}  shared {shared / 1024:.0f} KiB  spills {spills}"
    if report["op"] == "step":
        what += "  cache in place" if not report["copies"] else f"  {report['copies']} copies!"
    return f"{name}{what}", spills == 0 and not report["copies"]


def run_aot_check(
    model: str,
    target: str = "h200",
    *,
    block_size: int = 64,
    memory_utilization: float = 0.92,
    json_output: bool = False,
) -> int:
    """Print the report of a model folder or config.json; 1 when something does not compile as it
    should or does not fit, 2 when nothing can be said."""
    if target not in aot.TARGETS:
        print(f"target must be one of {', '.join(aot.TARGETS)}, not {target!r}", file=sys.stderr)
        return 2
    try:
        s = sizes(read_config(model))
        reports = list(aot_cases.compile_all(cases(s, target, block_size)))
    except (ValueError, RuntimeError) as e:
        print(e, file=sys.stderr)
        return 2
    whole = any(r["op"] == "step" for r in reports)
    temp = max((r.get("temp", 0) for r in reports), default=0)
    weights = s.parameters * 2
    block = block_size * s.kv_width * s.layers * 2
    usable = int(aot.TARGETS[target].memory * memory_utilization)
    left = usable - weights - temp
    blocks = max(0, math.floor(left / block))
    lines = [describe(r) for r in reports]
    good = all(ok for _, ok in lines) and blocks > 0
    if json_output:
        summary = {"weights": weights, "temp": temp, "block_bytes": block, "blocks": blocks}
        print(json.dumps({"target": target, **summary, "cases": reports}, indent=1))
        return 0 if good else 1
    print(f"{model} on {aot.TARGETS[target].name}")
    for line, _ in lines:
        print("  " + line)
    print(f"  weights {weights / GIB:.2f} GiB, largest temporary {temp / GIB:.2f} GiB")
    if not whole:
        print("  (of kernels alone: whole steps are compiled for plain dense models only)")
    print(f"  usable memory {usable / GIB:.2f} GiB, one KV block {block / 1024:.0f} KiB")
    if blocks:
        print(f"  {blocks} KV blocks: {blocks * block_size} tokens of context in all")
    else:
        print("  does not fit: no memory is left for the KV cache")
    return 0 if good else 1
