"""Published figures of GPUs: dense arithmetic, bandwidths, memory."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """Rates a second, from the maker's data sheets: `flops` by type, dense (without sparsity);
    `memory` and `link` (to the other GPUs, one way) in bytes; `host_link` to host memory, one
    way; `collective_latency` in seconds."""

    name: str
    memory_bytes: int
    memory: float
    flops: dict[str, float] = field(hash=False)
    link: float
    host_link: float
    collective_latency: float = 12e-6


# memory_bytes as a driver reports them (`lab.aot.aot.TARGETS` has the same).
GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", 84_987_740_160, 2.039e12,
        {"float32": 156e12, "bfloat16": 312e12, "int8": 624e12},
        link=300e9, host_link=25e9,
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", 84_942_979_072, 3.352e12,
        {"float32": 494.7e12, "bfloat16": 989.4e12, "float8": 1978.9e12, "int8": 1978.9e12},
        link=450e9, host_link=50e9,
    ),
    "h200": Gpu(
        "NVIDIA H200", 151_397_597_184, 4.8e12,
        {"float32": 494.7e12, "bfloat16": 989.4e12, "float8": 1978.9e12, "int8": 1978.9e12},
        link=450e9, host_link=50e9,
    ),
    "b200": Gpu(
        "NVIDIA B200", 191_000_000_000, 8e12,
        {"float32": 1125e12, "bfloat16": 2250e12, "float8": 4500e12, "int8": 4500e12},
        link=900e9, host_link=50e9,
    ),
    "l40s": Gpu(
        "NVIDIA L40S", 48_318_382_080, 0.864e12,
        {"float32": 183e12, "bfloat16": 362.05e12, "float8": 733e12, "int8": 733e12},
        link=25e9, host_link=25e9, collective_latency=20e-6,
    ),
}  # fmt: skip


def gpu_of(name: str) -> Gpu:
    """Raises ValueError for an unknown name."""
    if name not in GPUS:
        raise ValueError(f"device must be one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name]
