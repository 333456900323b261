"""The engine's own steps compiled for several H200s: what fits, what travels, what overlaps.

Skipped where JAX's CUDA plugin is not installed (`make test-aot` installs it).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from testdata import CONFIGS

from jaxengine.lab.aot import aot
from jaxengine.lab.aot.aot_step import compile_steps, devices_of

MEMORY = int(aot.TARGETS["h200"].memory * 0.92)
# As published; not among the shared ones.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(aot.missing()), reason=aot.missing()),
]


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return config


def steps(config: dict[str, Any], *variants: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    shape = {"target": "h200", "tokens": 256, "rows": 256, "decode_only": True, "config": config}
    reports = list(compile_steps([{**shape, **more, **variant} for variant in variants]))
    for report in reports:
        assert "error" not in report, report["error"]
        assert report["copies"] == 0 and report["captured"]
        assert all(kernel["spill_bytes"] == 0 for kernel in report["kernels"])
    return reports


def beside(report: dict[str, Any]) -> list[bool]:
    """For every exchange: do matrix products run beside it?"""
    pairs = [p for p in report["pairs"] if p["op"] not in ("all-reduce", "collective-permute")]
    return [pair["flops_between"] > 0 for pair in pairs]


def no_weights_travel(report: dict[str, Any], config: dict[str, Any]) -> None:
    """No collective moves more than all devices' activations of the step."""
    activations = report["tokens"] * config["hidden_size"] * 4 * devices_of(report)
    sizes = [pair["bytes"] for pair in report["pairs"]]
    assert max(sizes) <= 1.2 * activations, (max(sizes), activations)


def test_halves_overlap_in_the_engines_step() -> None:
    config = published("Qwen3-30B-A3B")
    mesh = {"attention_data_parallel_size": 8, "enable_expert_parallel": True, "enable_dbo": True}
    mesh["all2all_backend"] = "all_to_all"
    on, off = steps(config, {"dbo": True}, {"dbo": False}, layers=2, **mesh)
    assert set(on["collectives"]) == {"all-to-all"}
    share = sum(beside(on)) / len(beside(on))
    print(f"{sum(beside(on))} of {len(beside(on))} exchanges overlap; off: {sum(beside(off))}")
    assert share >= 0.8 and not any(beside(off))


@pytest.mark.slow
def test_llama_70b_on_four() -> None:
    config = published("Llama-3.3-70B-Instruct")
    (report,) = steps(config, {}, tensor_parallel_size=4)
    # Two sums a layer, one for the embedding; nothing else.
    assert report["collectives"] == {"all-reduce": 2 * 80 + 1}
    no_weights_travel(report, config)
    left = MEMORY - report["weights"] - report["temp"]
    print(
        f"weights {report['weights'] / 2**30:.1f} GiB, left for KV {left / 2**30:.1f} GiB a device"
    )
    assert left > 80 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 16])
def test_deepseek_v3(devices: int) -> None:
    mesh = {"attention_data_parallel_size": devices, "enable_expert_parallel": True}
    (report,) = steps(DEEPSEEK_V3, {}, layers=5, **mesh)
    no_weights_travel(report, DEEPSEEK_V3)
    names = {kernel["name"].rpartition("_")[0] for kernel in report["kernels"]}
    assert "mla_attention" in names
    left = MEMORY - report["weights"] - report["temp"]
    print(f"{devices}: weights {report['weights'] / 2**30:.1f} GiB, left {left / 2**30:.1f} GiB")
    print(report["collectives"], "in 2 layers of experts")
    # bfloat16: 1.3 TB of weights need more than eight devices.
    assert (left > 0) == (devices == 16)
