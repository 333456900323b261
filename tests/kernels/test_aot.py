"""Every kernel compiled to machine code of an H200, on a machine without one.

Skipped where JAX's CUDA plugin is not installed (`sh scripts/install_aot.sh`).
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import pytest

from jaxengine.pallas_kernels import aot, aot_cases

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs" / "h200"
pytestmark = pytest.mark.timeout(900)  # the first test compiles for all
needs_plugin = pytest.mark.skipif(bool(aot.missing()), reason=aot.missing())

ATTENTION = {
    "llama-3.1-8b decode": {"heads": 32, "kv_heads": 8, "head_dim": 128},
    "llama-3.1-8b prefill": {
        "heads": 32, "kv_heads": 8, "head_dim": 128, "tokens": 2048, "rows": 4,
    },
    "gpt-oss-20b decode": {
        "heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128, "sinks": True, "page": 16,
    },
    "gemma-2-9b decode": {
        "heads": 16, "kv_heads": 8, "head_dim": 256, "window": 4096, "soft_cap": 50.0,
    },
    "llama-3.1-8b fp8": {"heads": 32, "kv_heads": 8, "head_dim": 128, "fp8": True},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b up": {
        "op": "moe", "experts": 128, "width": 2048, "inner": 768, "rows": 65536, "gated": True,
    },
    "qwen3-30b-a3b down, decode": {
        "op": "moe", "experts": 128, "width": 2048, "inner": 768, "rows": 1024, "gated": False,
    },
    "deepseek-v3 up": {
        "op": "moe", "experts": 32, "width": 7168, "inner": 2048, "rows": 8192, "gated": True,
    },
    "gpt-oss-20b up": {
        "op": "moe", "experts": 32, "width": 2880, "inner": 2880, "rows": 1024, "gated": True,
    },
    "deepseek-v3 latent attention": {"op": "mla_attention", "heads": 128},
    "int8": {"op": "quant_matmul", "kind": "int8", "outputs": 4096, "inputs": 4096},
    "int4 groups": {
        "op": "quant_matmul", "kind": "int4", "outputs": 4096, "inputs": 4096, "grouped": True,
    },
    "kv write": {"op": "kv_write", "kv_heads": 8, "head_dim": 128},
    "kv write fp8": {"op": "kv_write", "kv_heads": 8, "head_dim": 128, "fp8": True},
    "gather blocks": {"op": "block_copy", "gather": True},
    "scatter blocks": {"op": "block_copy", "gather": False},
}  # fmt: skip


@functools.cache
def reports() -> dict[str, dict[str, Any]]:
    """All cases, compiled once."""
    cases: list[dict[str, Any]] = [
        {"op": "paged_attention", "name": n, **a} for n, a in ATTENTION.items()
    ]
    cases += [{"name": n, **a} for n, a in OTHERS.items()]
    return {r["name"]: r for r in aot_cases.compile_all(cases, timeout=600)}


@needs_plugin
@pytest.mark.parametrize("name", [*ATTENTION, *OTHERS])
def test_fits_the_machine(name: str) -> None:
    report = reports()[name]
    assert "error" not in report, report["error"]
    assert report["kernels"]
    for kernel in report["kernels"]:
        # jax 0.11 keeps more of the latent kernel's values alive at once than 0.12.
        latent = kernel["name"].startswith("mla_attention") and jax.__version__ < "0.12"
        assert kernel["spill_bytes"] <= (1024 if latent else 0), kernel
        assert 0 < kernel["registers"] <= 255, kernel
        assert 0 <= kernel["shared"] <= 232448, kernel
    # XLA makes a command buffer of five launches or more; these programs have fewer.
    short = name.endswith(" blocks") or name.startswith("int")
    assert report["captured"] or short, "the kernel is not in a command buffer"


@needs_plugin
@pytest.mark.parametrize("name", [n for n in (*ATTENTION, *OTHERS) if "write" not in n])
def test_uses_the_copy_engine_and_tensor_cores(name: str) -> None:
    kernels = reports()[name]["kernels"]
    assert any(k["tma"] for k in kernels)
    assert any(k["wgmma"] for k in kernels) != name.endswith("blocks")


@needs_plugin
@pytest.mark.parametrize("name", ["kv write", "kv write fp8", "scatter blocks"])
def test_cache_is_updated_in_place(name: str) -> None:
    report = reports()[name]
    assert report["aliased"] > 0 and report["copies"] == 0


@needs_plugin
@pytest.mark.slow
def test_whole_step_updates_the_cache_in_place() -> None:
    shapes = {
        "llama-3.1-8b": {
            "vocab": 128256, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8,
            "head_dim": 128, "ffn": 14336,
        },
        "qwen3-8b": {
            "vocab": 151936, "layers": 36, "width": 4096, "heads": 32, "kv_heads": 8,
            "head_dim": 128, "ffn": 12288, "qk_norm": True,
        },
    }  # fmt: skip
    cases = [
        {"op": "step", "shape": s, "tokens": t, "rows": 64, "blocks": 1000}
        for s in shapes.values()
        for t in (64, 2048)
    ]
    for report in aot_cases.compile_all(cases):
        assert "error" not in report, report["error"]
        assert all(k["spill_bytes"] == 0 for k in report["kernels"])
        assert report["copies"] == 0 and report["aliased"] > 0


@pytest.mark.parametrize("op", ["paged_attention", "moe", "quant_matmul"])
def test_shipped_tables_hold_only_what_compiles(op: str) -> None:
    table = json.loads((CONFIGS / f"{op}.json").read_text())
    assert table["op"] == op and table["entries"]
    for entry in table["entries"]:
        assert entry["aot"]["spill_bytes"] == 0
        assert 0 < entry["aot"]["shared"] <= 232448


def test_a_machine_without_the_plugin_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "missing", lambda: "the CUDA plugin of JAX is not installed")
    with pytest.raises(RuntimeError, match="not installed"):
        next(aot_cases.compile_all([{"op": "kv_write"}]))
