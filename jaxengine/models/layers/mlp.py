"""Gated MLP with its activations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.parallel import row_parallel
from jaxengine.parallel.layout import StepLayout


def gated(gate_up: Float[Array, "T F2"], activation: str) -> Float[Array, "T F"]:
    """activation(gate) * up of the two halves; "silu" or "gelu" (tanh form)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if activation == "gelu":
        return jax.nn.gelu(gate, approximate=True) * up
    return jax.nn.silu(gate) * up


def mlp(
    p: dict[str, Any], x: Float[Array, "T D"], activation: str, layout: StepLayout
) -> Float[Array, "T D"]:
    """down(activation(gate(x)) * up(x)), float32."""
    hidden = gated(linear(x, p["gate_up"], p.get("gate_up_bias")), activation)
    return row_parallel(hidden, p["down"], layout, p.get("down_bias"))
