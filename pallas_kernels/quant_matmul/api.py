"""Products with quantised weights, by the Hopper kernel or by XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxengine.pallas_kernels import device, tuning
from jaxengine.pallas_kernels.quant_matmul import mosaic, reference
from jaxengine.pallas_kernels.quant_matmul.config import (
    BLOCK_K,
    MAX_ROWS,
    QuantConfig,
    default_config,
)
from jaxengine.pallas_kernels.quant_matmul.reference import QuantWeight


def unsupported(x: Any, weight: QuantWeight) -> str:
    """Why the Hopper kernel cannot take these operands; "" if it can."""
    rows, depth = x.shape
    groups = weight.scale.shape[1]
    if weight.kind == "fp8":
        return "XLA gives fp8 products to cuBLASLt"
    if jnp.dtype(x.dtype).name not in ("bfloat16", "float16"):
        return f"inputs are {x.dtype}, not bfloat16 or float16"
    if rows > MAX_ROWS:
        return f"{rows} tokens are more than {MAX_ROWS}"
    if depth % BLOCK_K or weight.data.shape[0] % 64:
        return f"{weight.data.shape[0]} x {depth} is not made of 64 x {BLOCK_K} blocks"
    if groups not in (1, depth // BLOCK_K):
        return f"scales are for groups of {depth // groups}, not {BLOCK_K} or all inputs"
    return ""


def quant_matmul(
    x: Float[Array, "T K"],
    weight: QuantWeight,
    *,
    config: QuantConfig | None = None,
    backend: str = "auto",
    num_sms: int | None = None,
    interpret: Any = None,
) -> Float[Array, "T N"]:
    """x times the weight's transpose. fp8 weights with one scale an output quantise x by token
    on a GPU that multiplies fp8; elsewhere weights are widened. Raises ValueError for shapes
    that do not fit."""
    depth = weight.data.shape[1] * (2 if weight.kind == "int4" else 1)
    if x.ndim != 2 or x.shape[1] != depth or weight.scale.shape[0] != weight.data.shape[0]:
        raise ValueError(f"x {x.shape} does not fit a weight [{weight.data.shape[0]}, {depth}]")
    reason = unsupported(x, weight)
    if not device.choose("quant_matmul", backend, reason, simulated=interpret is not None):
        if weight.kind == "fp8" and weight.scale.shape[1] == 1 and not device.device_reason():
            return reference.fp8_matmul(x, weight)
        return reference.matmul(x, weight)
    rows = x.shape[0]
    if config is None:
        outputs = weight.data.shape[0]
        key = {"kind": weight.kind, "outputs": outputs, "inputs": depth, "tokens_bucket": rows}
        tuned = tuning.measured("quant_matmul", key)
        heuristic = default_config(outputs, depth, rows, num_sms or device.num_sms())
        config = QuantConfig(**tuned) if tuned else heuristic
    padded = jnp.pad(x, ((0, -rows % 8), (0, 0)))
    return mosaic.matmul(padded, weight, config, interpret=interpret)[:rows]
