"""MXFP4: 4-bit floats in blocks of 32 with one power of two each (OCP microscaling formats)."""

from __future__ import annotations

import numpy as np

BLOCK = 32
# sign, two bits of exponent, one of mantissa
_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_TABLE = np.concatenate([_VALUES, -_VALUES])
_BIAS = 127


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [..., n * 32] from bytes [..., n, 16], low half first, and exponents [..., n]."""
    values = np.empty((*blocks.shape[:-1], BLOCK), np.float32)
    values[..., 0::2] = _TABLE[blocks & 15]
    values[..., 1::2] = _TABLE[blocks >> 4]
    values = np.ldexp(values, scales[..., None].astype(np.int32) - _BIAS)
    return values.reshape(*blocks.shape[:-2], -1)
