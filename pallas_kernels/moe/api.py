"""Expert MLPs over the experts' table, by the Hopper kernel or by XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import device, tuning
from jaxengine.pallas_kernels.moe import mosaic, reference, routing
from jaxengine.pallas_kernels.moe.config import MoeConfig, default_config


def unsupported(x: Any, weights: Any, gated: bool, config: MoeConfig) -> str:
    """Why the Hopper kernel cannot take these operands; "" if it can."""
    width = weights.shape[1] // (2 if gated else 1)
    if jnp.dtype(x.dtype).name not in ("bfloat16", "float16") or x.dtype != weights.dtype:
        return f"operands are {x.dtype} and {weights.dtype}, not both bfloat16 or float16"
    if x.shape[1] % config.block_k:
        return f"the depth {x.shape[1]} is no multiple of {config.block_k}"
    if width % config.block_n:
        return f"the width {width} is no multiple of {config.block_n}"
    if config.swap and (config.block_n != 64 * config.compute_wgs or config.swap_rows % 8):
        return "swapped operands need block_n = 64 * compute_wgs and rows by eights"
    if x.shape[0] < config.block_m:
        return f"the table has {x.shape[0]} rows, less than a tile's {config.block_m}"
    return ""


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Float[Array, "E N K"],
    starts: Int[Array, "E"],
    counts: Int[Array, "E"],
    *,
    bias: Float[Array, "E N"] | None = None,
    activation: str = "",
    activation_limit: float = 7.0,
    activation_alpha: float = 1.702,
    config: MoeConfig | None = None,
    backend: str = "auto",
    num_sms: int | None = None,
    interpret: Any = None,
) -> Float[Array, "R N2"]:
    """x[r] @ weights[e].T for each row of expert e, with rows as `routing.dispatch` lays them.

    `bias` is added to an expert's rows. With `activation` the weights' first half is the gate and
    the second the up projection, and the result is activation(gate) * up, of half the width;
    "clamped_swiglu" (gpt-oss) uses activation_limit and activation_alpha. x is cast to the
    weights' type, sums are float32, the result has x's type. Rows that no expert owns are
    undefined. Raises ValueError for shapes that do not fit.
    """
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[2]:
        raise ValueError(f"x {x.shape} does not fit weights {weights.shape} (want [E, N, K])")
    experts, out, depth = weights.shape
    if counts.shape != (experts,) or starts.shape != (experts,):
        raise ValueError(f"starts and counts must be [{experts}]")
    if bias is not None and bias.shape != (experts, out):
        raise ValueError(f"bias must be [{experts}, {out}], got {bias.shape}")
    if activation and activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(reference.ACTIVATIONS)}")
    gated = bool(activation)
    if config is None:
        width = out // 2 if gated else out
        inner = width if gated else depth
        key: dict[str, Any] = {"width": depth if gated else width, "inner": inner, "gated": gated}
        key |= {"dtype": jnp.dtype(x.dtype).name}
        key |= {"rows_per_expert_bucket": x.shape[0] // experts}
        tuned = tuning.measured("moe", key)
        heuristic = default_config(x.shape[0], experts, width, depth, gated)
        config = MoeConfig(**tuned) if tuned else heuristic
    how: dict[str, Any] = {"bias": bias, "activation": activation}
    how |= {"limit": activation_limit, "alpha": activation_alpha}
    reason = unsupported(x, weights, gated, config)
    simulated = interpret is not None
    if not device.choose("moe", backend, reason, simulated=simulated):
        return reference.grouped_matmul(x, weights, starts, counts, **how)
    if bias is not None:
        how["bias"] = bias.astype(jnp.float32)
    return mosaic.grouped_matmul(
        x,
        weights,
        routing.plan_tiles(starts, counts, x.shape[0], config.block_m),
        config=config,
        num_sms=num_sms or device.num_sms(),
        interpret=interpret,
        **how,
    )


def moe_mlp(
    x: Float[Array, "T D"],
    gate_up: Float[Array, "E F2 D"],
    down: Float[Array, "E D F"],
    weights: Float[Array, "T K"],
    ids: Int[Array, "T K"],
    *,
    gate_up_bias: Float[Array, "E F2"] | None = None,
    down_bias: Float[Array, "E D"] | None = None,
    activation: str = "silu",
    activation_limit: float = 7.0,
    activation_alpha: float = 1.702,
    backend: str = "auto",
    num_sms: int | None = None,
    interpret: Any = None,
) -> Float[Array, "T D"]:
    """Sum over each token's experts of weight * down(activation(gate(x)) * up(x)).

    gate_up holds the gate's rows, then the up projection's; biases are added before the
    activation and before the weights. An id outside the experts given here adds nothing, which
    is what a device with a share of the experts needs. Activations are as in grouped_matmul.
    """
    where = routing.dispatch(ids, gate_up.shape[0])
    table = routing.gather_rows(x, where)
    how: dict[str, Any] = {"backend": backend, "num_sms": num_sms, "interpret": interpret}
    hidden = grouped_matmul(
        table,
        gate_up,
        where.starts,
        where.counts,
        bias=gate_up_bias,
        activation=activation,
        activation_limit=activation_limit,
        activation_alpha=activation_alpha,
        **how,
    )
    y = grouped_matmul(hidden, down, where.starts, where.counts, bias=down_bias, **how)
    return routing.combine(y, where, weights)
