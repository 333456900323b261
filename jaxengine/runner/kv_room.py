"""The device memory left for the KV pool, worked out before anything is loaded."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxengine.config import ParallelConfig
from jaxengine.models.layers.quantize import quantized_shapes
from jaxengine.models.params import param_shapes, param_specs
from jaxengine.models.spec import DecoderSpec
from jaxengine.parallel.layout import StepLayout
from jaxengine.parallel.mesh import Devices
from jaxengine.runner.divide import place_experts

CPU_KV_BYTES = 384 * 2**20  # of the pool when nothing was said, on CPU
RESERVE = 2 * 2**30  # activations, programs, slot records


def weight_bytes(
    spec: DecoderSpec,
    dtype: Any,
    layout: StepLayout,
    devices: Devices,
    parallel: ParallelConfig,
    quantization: str | None = None,
) -> int:
    """Bytes of the weights on one device of the fullest pipeline stage."""
    placed, _ = place_experts(parallel, spec)
    shapes = param_shapes(placed, dtype, layout.tensor_size)
    if quantization == "int8":  # of one device
        return local_bytes(quantized_shapes(shapes))
    tree = devices.place(shapes, param_specs(placed, layout))
    layers = local_bytes(tree["layers"])
    rest = local_bytes({name: part for name, part in tree.items() if name != "layers"})
    return -(-layers // parallel.pipeline_parallel_size) + rest


def local_bytes(tree: Any) -> int:
    """Bytes of ShapeDtypeStructs on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(local_shape(leaf)) * leaf.dtype.itemsize for leaf in leaves)


def local_shape(leaf: Any) -> tuple[int, ...]:
    if leaf.sharding is None:
        return tuple(leaf.shape)
    return tuple(leaf.sharding.shard_shape(leaf.shape))


def kv_room(stats: dict[str, int], utilization: float, weights: int) -> int:
    """Bytes for KV on a device with these `memory_stats` that will hold `weights` bytes of
    parameters."""
    limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    return max(0, int(limit * utilization) - used - weights - RESERVE)
