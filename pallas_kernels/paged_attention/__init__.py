"""Attention of new tokens over paged keys and values."""

from jaxengine.pallas_kernels.paged_attention.reference import (
    decode_attention as decode_attention,
)
from jaxengine.pallas_kernels.paged_attention.reference import (
    prefill_attention as prefill_attention,
)
