"""What one layer's KV cache is made of."""

from __future__ import annotations

import math

from jaxengine.models.spec import DecoderSpec
from jaxengine.parallel.layout import Stage, StepLayout


def cache_shapes(
    spec: DecoderSpec, layout: StepLayout, num_blocks: int, block_size: int
) -> tuple[tuple[int, ...], ...]:
    """Shapes of one layer's arrays over all devices of the tensor axis.

    Latent attention: one array [N, P, latent + rope], held whole by every device. Otherwise keys
    and values [N, P, G * C], or one array [N, 2, G, P, C] (head-major); G counts kv heads again
    for every device that has a copy.
    """
    if spec.mla is not None:
        return ((num_blocks, block_size, spec.mla.width),)
    heads = max(spec.num_kv_heads, layout.tensor_size)
    if layout.cache == "head_major":
        return ((num_blocks, 2, heads, block_size, spec.head_dim),)
    return ((num_blocks, block_size, heads * spec.head_dim),) * 2


def cache_head_axis(spec: DecoderSpec, layout: StepLayout) -> int | None:
    """The axis of those arrays that the tensor axis divides; None: every device has it all."""
    if spec.mla is not None or not layout.tensor_axis:
        return None
    return 2


def cache_bytes_per_token(
    spec: DecoderSpec, itemsize: int, layout: StepLayout | None = None
) -> int:
    """Bytes of one token in all layers' caches, over all devices of the tensor axis."""
    shapes = cache_shapes(spec, layout or StepLayout(), 1, 1)
    return spec.num_layers * itemsize * sum(math.prod(shape) for shape in shapes)


def device_bytes_per_token(
    spec: DecoderSpec, itemsize: int, layout: StepLayout, stages: int = 1
) -> int:
    """Bytes of one token on a device of the fullest pipeline stage: its share of the heads, or the
    whole of the latents."""
    share = 1 if cache_head_axis(spec, layout) is None else layout.tensor_size
    layers = max(len(Stage(i, stages).layers(spec.num_layers)) for i in range(stages))
    shapes = cache_shapes(spec, layout, 1, 1)
    return layers * itemsize * sum(math.prod(shape) for shape in shapes) // share
