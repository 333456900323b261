"""Products with quantised weights, by the Hopper kernels or by XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxengine.pallas_kernels import device, tuning
from jaxengine.pallas_kernels.quant_matmul import fp8, mosaic, reference
from jaxengine.pallas_kernels.quant_matmul.config import (
    BLOCK_K,
    MAX_ROWS,
    Fp8Config,
    QuantConfig,
    default_config,
    default_fp8,
)
from jaxengine.pallas_kernels.quant_matmul.reference import QuantWeight


def unsupported(x: Any, weight: QuantWeight, backend: str = "mosaic") -> str:
    """Why the Hopper kernels cannot take these operands, or for "auto" should not; "" if not."""
    rows, depth = x.shape
    outputs, groups = weight.data.shape[0], weight.scale.shape[1]
    if jnp.dtype(x.dtype).name not in ("bfloat16", "float16"):
        return f"inputs are {x.dtype}, not bfloat16 or float16"
    if depth % BLOCK_K or outputs % 64:
        return f"{outputs} x {depth} is not made of 64 x {BLOCK_K} blocks"
    if weight.kind == "fp8":
        if groups != 1:
            return "fp8 weights have scales for groups of inputs"
        if rows > MAX_ROWS and backend == "auto":
            return f"cuBLASLt takes fp8 products of more than {MAX_ROWS} tokens"
        return ""
    if rows > MAX_ROWS:
        return f"{rows} tokens are more than {MAX_ROWS}"
    if groups not in (1, depth // BLOCK_K):
        return f"scales are for groups of {depth // groups}, not {BLOCK_K} or all inputs"
    return ""


def quant_matmul(
    x: Float[Array, "T K"],
    weight: QuantWeight,
    *,
    x_scale: Float[Array, ""] | None = None,
    config: QuantConfig | Fp8Config | None = None,
    backend: str = "auto",
    num_sms: int | None = None,
    interpret: Any = None,
) -> Float[Array, "T N"]:
    """x times the weight's transpose.

    fp8 weights with one scale an output or one in all quantise x too, on a GPU that multiplies
    fp8: by token, or by the fixed `x_scale`. Everywhere else weights are widened and x is left
    as it is. Raises ValueError for shapes that do not fit.
    """
    outputs = weight.data.shape[0]
    depth = weight.data.shape[1] * (2 if weight.kind == "int4" else 1)
    if x.ndim != 2 or x.shape[1] != depth or weight.scale.shape[0] not in (1, outputs):
        raise ValueError(f"x {x.shape} does not fit a weight [{outputs}, {depth}]")
    reason = unsupported(x, weight, backend)
    if not device.choose("quant_matmul", backend, reason, simulated=interpret is not None):
        if weight.kind == "fp8" and weight.scale.shape[1] == 1 and not device.device_reason():
            return reference.fp8_matmul(x, weight, x_scale)
        return reference.matmul(x, weight)
    rows = x.shape[0]
    narrow = weight.kind == "fp8"
    if config is None:
        key = {"kind": weight.kind, "outputs": outputs, "inputs": depth, "tokens_bucket": rows}
        tuned = tuning.measured("quant_matmul", key)
        sms = num_sms or device.num_sms()
        if narrow:
            config = Fp8Config(**tuned) if tuned else default_fp8(outputs, depth, rows, sms)
        else:
            config = QuantConfig(**tuned) if tuned else default_config(outputs, depth, rows, sms)
    if isinstance(config, Fp8Config) != narrow:
        raise ValueError(f"{type(config).__name__} does not fit {weight.kind} weights")
    scale = jnp.broadcast_to(weight.scale, (outputs, weight.scale.shape[1]))
    if not isinstance(config, Fp8Config):
        padded = jnp.pad(x, ((0, -rows % 8), (0, 0)))
        weight = QuantWeight(weight.data, scale)
        return mosaic.matmul(padded, weight, config, interpret=interpret)[:rows]
    values, scales = reference.quantise_tokens(x, x_scale)
    more = -rows % config.block_t
    out = fp8.matmul(
        jnp.pad(values, ((0, more), (0, 0))),
        jnp.pad(scales, (0, more)),
        weight.data,
        scale[:, 0],
        config,
        dtype=x.dtype,
        interpret=interpret,
    )
    return out[:rows]
