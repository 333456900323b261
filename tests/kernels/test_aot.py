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

from jaxengine.lab.aot import aot, aot_cases, tune

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs" / "h200"
pytestmark = pytest.mark.timeout(900)  # the first test compiles for all


def needs_plugin(test: Any) -> Any:
    """Runs in `make test-aot`."""
    return pytest.mark.aot(pytest.mark.skipif(bool(aot.missing()), reason=aot.missing())(test))


LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128}
GPT_OSS = {"heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128, "sinks": True, "page": 16}
EVERYTHING = {**LLAMA, "window": 512, "soft_cap": 30.0, "sinks": True}
PROMPTS = {"tokens": 2048, "rows": 4}
ATTENTION: dict[str, dict[str, Any]] = {
    "llama-3.1-8b decode": LLAMA,
    "llama-3.1-8b prefill": {**LLAMA, **PROMPTS},
    "gpt-oss-20b decode": GPT_OSS,
    "gpt-oss-20b prefill": {**GPT_OSS, **PROMPTS},
    "llama-3.1-8b fp8": {**LLAMA, "fp8": True},
}
SLOW_ATTENTION: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b decode": {"heads": 32, "kv_heads": 4, "head_dim": 128},
    "qwen3-30b-a3b prefill": {"heads": 32, "kv_heads": 4, "head_dim": 128, **PROMPTS},
    "gemma-2-9b decode": {
        "heads": 16, "kv_heads": 8, "head_dim": 256, "window": 4096, "soft_cap": 50.0,
    },
    "window, cap and sinks, decode": EVERYTHING,
    "window, cap and sinks, prefill": {**EVERYTHING, **PROMPTS},
    **{
        f"width {dim} {kind}": {"heads": 16, "kv_heads": 8, "head_dim": dim, **more}
        for dim in (80, 96, 192, 256)
        for kind, more in (("decode", {}), ("prefill", PROMPTS), ("fp8", {"fp8": True}))
        # 80 runs in XLA, 256 spills 1 KB a thread: docs/kernels.md.
        if kind != "fp8" or dim not in (80, 256)
    },
}  # fmt: skip
QWEN_MOE = {"op": "moe", "experts": 128, "width": 2048, "inner": 768}
DEEPSEEK_MOE = {"op": "moe", "experts": 32, "width": 7168, "inner": 2048}
OSS_MOE = {
    "op": "moe", "experts": 32, "width": 2880, "inner": 2880, "bias": True,
    "activation": "clamped_swiglu",
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    f"{model} {part} {rows} rows an expert": {
        **shape, "gated": part == "up", "rows": rows * shape["experts"],
    }
    for model, shape in (
        ("qwen3-30b-a3b", QWEN_MOE), ("deepseek-v3", DEEPSEEK_MOE), ("gpt-oss-20b", OSS_MOE),
    )
    for part in ("up", "down")
    for rows in (8, 16, 512)
}  # fmt: skip
QUANT = {"op": "quant_matmul", "outputs": 4096, "inputs": 4096}
OTHERS: dict[str, dict[str, Any]] = {
    **EXPERTS,
    "deepseek-v3 latent attention": {"op": "mla_attention", "heads": 128},
    "int8": {**QUANT, "kind": "int8"},
    "int4 groups": {**QUANT, "kind": "int4", "grouped": True},
    "fp8 decode": {**QUANT, "kind": "fp8"},
    "fp8 prefill": {**QUANT, "kind": "fp8", "tokens": 2048, "backend": "mosaic"},
    "kv write": {"op": "kv_write", "kv_heads": 8, "head_dim": 128},
    "kv write fp8": {"op": "kv_write", "kv_heads": 8, "head_dim": 128, "fp8": True},
    "gather blocks": {"op": "block_copy", "gather": True},
    "scatter blocks": {"op": "block_copy", "gather": False},
}


@functools.cache
def reports(slow: bool = False) -> dict[str, dict[str, Any]]:
    """All cases of a kind, compiled once."""
    attention = SLOW_ATTENTION if slow else ATTENTION
    cases: list[dict[str, Any]] = [
        {"op": "paged_attention", "name": n, **a} for n, a in attention.items()
    ]
    if not slow:
        cases += [{"name": n, **a} for n, a in OTHERS.items()]
    return {r["name"]: r for r in aot_cases.compile_all(cases, timeout=600)}


def check_machine(report: dict[str, Any]) -> None:
    """No spills; registers and shared memory within a CTA's."""
    assert "error" not in report, report["error"]
    assert report["kernels"]
    for kernel in report["kernels"]:
        # jax 0.11 keeps more of the latent kernel's values alive at once than 0.12.
        latent = kernel["name"].startswith("mla_attention") and jax.__version__ < "0.12"
        assert kernel["spill_bytes"] <= (1024 if latent else 0), kernel
        # ptxas lowers the figure itself where warpgroups share the 64 K registers of an SM.
        assert 0 < kernel["registers"] <= 255, kernel
        assert kernel["registers"] * kernel["threads"] <= 65536, kernel
        assert 0 <= kernel["shared"] <= 232448, kernel


@needs_plugin
@pytest.mark.parametrize("name", [*ATTENTION, *OTHERS])
def test_fits_the_machine(name: str) -> None:
    report = reports()[name]
    check_machine(report)
    # XLA makes a command buffer of five launches or more; these programs have fewer.
    short = name.endswith(" blocks") or name.startswith(("int", "fp8"))
    assert report["captured"] or short, "the kernel is not in a command buffer"


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_ATTENTION)
def test_every_width_fits_the_machine(name: str) -> None:
    check_machine(reports(slow=True)[name])


@needs_plugin
@pytest.mark.parametrize("name", [n for n in (*ATTENTION, *OTHERS) if "write" not in n])
def test_uses_the_copy_engine_and_tensor_cores(name: str) -> None:
    kernels = reports()[name]["kernels"]
    assert any(k["tma"] for k in kernels)
    assert any(k["wgmma"] for k in kernels) != name.endswith("blocks")


@needs_plugin
def test_other_devices_run_in_xla_and_say_why() -> None:
    """Compiled for an A100 and a B200: no kernel of ours, and the reason is logged."""
    cases = [
        {**OTHERS[n], "name": f"{n} {target}", "target": target}
        for target in ("a100", "b200")
        for n in ("kv write fp8", "fp8 decode", "gpt-oss-20b up 8 rows an expert")
    ]
    for report in aot_cases.compile_all(cases):
        assert "error" not in report, report["error"]
        assert report["kernels"] == [], report["name"]
        capability = "8.0" if report["target"] == "a100" else "10.0"
        assert any(
            f"compute capability 9.0, the device has {capability}" in r for r in report["reasons"]
        ), report["reasons"]


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
    listed = [(e["key"], e["config"]) for e in table["entries"] + table["dropped"]]
    assert listed and all((k, c) in listed for k, _, c in tune.candidates(op))
    for entry in table["entries"]:
        assert entry["aot"]["spill_bytes"] == 0
        assert 0 < entry["aot"]["shared"] <= 232448


def test_a_machine_without_the_plugin_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "missing", lambda: "the CUDA plugin of JAX is not installed")
    with pytest.raises(RuntimeError, match="not installed"):
        next(aot_cases.compile_all([{"op": "kv_write"}]))
