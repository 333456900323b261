"""The engine's own forward programs, compiled to machine code of an H200 without one.

Skipped where JAX's CUDA plugin is not installed (`make test-aot` installs it).
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from typing import Any

import pytest
from testdata import CONFIGS

from jaxengine.lab.aot import aot
from jaxengine.lab.aot.aot_step import compile_steps
from jaxengine.sched.batch import Bucket
from jaxengine.sched.buckets import all_buckets

MODELS = ("Llama-3.1-8B", "Qwen3-8B")
FEW = (Bucket(64, 64, True), Bucket(2048, 256, False))
pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(aot.missing()), reason=aot.missing()),
]


def case(model: str, bucket: Bucket) -> dict[str, Any]:
    config = json.loads((CONFIGS / model / "config.json").read_text())
    return {"name": f"{model} {bucket}", "config": config, "target": "h200", **asdict(bucket)}


@functools.cache
def few(model: str) -> dict[str, dict[str, Any]]:
    # A process a model: a kernel that was compiled before leaves no report a second time.
    return {r["name"]: r for r in compile_steps([case(model, bucket) for bucket in FEW])}


def check(report: dict[str, Any]) -> None:
    assert "error" not in report, report["error"]
    assert "mosaic_gpu_v2" in report["custom_calls"]
    # A kernel that a step before in the same process has too leaves no report again.
    names = {k["name"].rpartition("_")[0] for k in report["kernels"]}
    assert names <= {"paged_attention", "combine_parts"}
    for kernel in report["kernels"]:
        assert kernel["spill_bytes"] == 0, kernel
        assert 0 < kernel["registers"] <= 255, kernel
        assert 0 <= kernel["shared"] <= 232448, kernel
        assert kernel["tma"], kernel
        assert kernel["wgmma"] == kernel["name"].startswith("paged_attention"), kernel
    assert report["captured"], "the kernels are not in a command buffer"
    assert report["aliased"] >= report["cache_bytes"], "the cache is not donated"
    assert report["copies"] == 0, "the cache is copied"


@pytest.mark.parametrize("bucket", FEW, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_step(model: str, bucket: Bucket) -> None:
    report = few(model)[f"{model} {bucket}"]
    check(report)
    assert len(report["kernels"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_bucket(model: str) -> None:
    buckets = all_buckets(256, 8192)
    reports = list(compile_steps([case(model, b) for b in buckets], timeout=3600))
    assert len(reports) == len(buckets)
    for report in reports:
        check(report)
        print(report["name"], report["temp"] >> 20, "MiB", report["seconds"], "s")
