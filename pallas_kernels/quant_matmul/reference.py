"""Quantised weights, and products with them in XLA."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

KINDS = ("int8", "int4", "fp8")
PACK = 128  # int4: inputs of one packed block


class QuantWeight(NamedTuple):
    """A weight [N outputs, K inputs].

    data: int8 [N, K], fp8 (e4m3) [N, K], or int4 packed in int8 [N, K / 2]: in every block of 128
    inputs, byte j holds input j in its low and input j + 64 in its high half.
    scale [N, K / group]: what the stored numbers of each group of inputs are multiplied by; one
    column for a scale per output, and then one row for a scale per tensor.
    """

    data: Int[Array, "N K2"]
    scale: Float[Array, "N groups"]

    @property
    def kind(self) -> str:
        if self.data.dtype == jnp.float8_e4m3fn:
            return "fp8"
        return "int8" if self.data.dtype == jnp.int8 else "int4"


def pack_int4(values: Int[Array, "N K"]) -> Int[Array, "N K2"]:
    """Two numbers of -8 .. 7 a byte (uint8), as QuantWeight says; K is a multiple of 128."""
    n, k = values.shape
    blocks = values.astype(jnp.int32).reshape(n, k // PACK, 2, PACK // 2)
    low, high = blocks[:, :, 0] & 15, blocks[:, :, 1] & 15
    return (low | (high << 4)).astype(jnp.uint8).reshape(n, k // 2)


def unpack_int4(data: Int[Array, "N K2"]) -> Int[Array, "N K"]:
    n, half = data.shape
    b = data.astype(jnp.int32).reshape(n, half * 2 // PACK, PACK // 2)
    low, high = ((b & 15) ^ 8) - 8, ((b >> 4) ^ 8) - 8
    return jnp.stack([low, high], axis=2).reshape(n, half * 2).astype(jnp.int8)


def quantise(
    weight: Float[Array, "N K"], kind: str, group: int = 0, *, whole: bool = False
) -> QuantWeight:
    """Symmetric, by the largest magnitude of an output's inputs, of each `group` of them, or of
    the `whole` weight.

    Raises ValueError for an unknown kind or a K that the group (int4: 128) does not divide.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    n, k = weight.shape
    size = group or k
    if k % size or (kind == "int4" and k % PACK):
        raise ValueError(f"{k} inputs are no multiple of {PACK if kind == 'int4' else size}")
    top = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}[kind]
    w = weight.astype(jnp.float32).reshape(n, k // size, size)
    largest = jnp.abs(w).max(-1)
    if whole:
        largest = largest.max(keepdims=True)
    scale = jnp.maximum(largest / top, 1e-12)
    w = (w / scale[:, :, None]).reshape(n, k)
    if kind == "fp8":
        return QuantWeight(w.astype(jnp.float8_e4m3fn), scale)
    data = jnp.clip(jnp.round(w), -top, top).astype(jnp.int8)
    return QuantWeight(pack_int4(data) if kind == "int4" else data, scale)


def dequantise(weight: QuantWeight, dtype: Any = jnp.float32) -> Array:
    """[N, K] in `dtype`."""
    data = unpack_int4(weight.data) if weight.kind == "int4" else weight.data
    n, k = data.shape
    groups = weight.scale.shape[1]
    w = data.astype(jnp.float32).reshape(n, groups, k // groups) * weight.scale[:, :, None]
    return w.reshape(n, k).astype(dtype)


def matmul(x: Float[Array, "T K"], weight: QuantWeight) -> Float[Array, "T N"]:
    """x @ dequantised weight's transpose."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    w = dequantise(weight, x.dtype)
    y = jnp.einsum("tk,nk->tn", x, w, precision=exact, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def quantise_tokens(
    x: Float[Array, "T K"], x_scale: Float[Array, ""] | None = None
) -> tuple[Float[Array, "T K"], Float[Array, "T"]]:
    """fp8 numbers and their scales: each token's by its largest magnitude, or all `x_scale`."""
    wide = x.astype(jnp.float32)
    if x_scale is None:
        scale = jnp.maximum(jnp.abs(wide).max(-1) / 448.0, 1e-12)
    else:
        scale = jnp.broadcast_to(jnp.asarray(x_scale, jnp.float32), x.shape[:1])
    # Beyond the largest number e4m3 has only NaN.
    return jnp.clip(wide / scale[:, None], -448.0, 448.0).astype(jnp.float8_e4m3fn), scale


def fp8_matmul(
    x: Float[Array, "T K"], weight: QuantWeight, x_scale: Float[Array, ""] | None = None
) -> Float[Array, "T N"]:
    """Both operands in fp8: XLA gives it to cuBLASLt."""
    narrow, scale = quantise_tokens(x, x_scale)
    y = jnp.einsum("tk,nk->tn", narrow, weight.data, preferred_element_type=jnp.float32)
    return (y * scale[:, None] * weight.scale[:, 0]).astype(x.dtype)
