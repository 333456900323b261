"""8-bit weights: one float scale per output channel; activations are scaled per row at run time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from jaxengine.models.spec import Params
from jaxengine.progress import progress_bar

# `down` stays wide: what gated activations feed it has outliers, and rounding them cost more
# perplexity than all the others together (5.3 against 2.1 % on the demo model).
MATRICES = ("qkv", "o", "gate_up")


@jax.jit
def quantize(
    weight: Float[Array, "out in"],
) -> tuple[Int8[Array, "out in"], Float[Array, "out"]]:
    """Symmetric, round to nearest: weight ~ int8 * scale[:, None]."""
    wide = weight.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(-1), 1e-12) / 127.0
    return jnp.round(wide / scale[:, None]).astype(jnp.int8), scale


def quantize_params(params: Params) -> Params:
    """The tree with its matrix products in 8 bits; the embedding stays as lookup table.

    A tied head becomes an 8-bit copy of its own. Replaces leaf by leaf, so that the wide
    matrices are freed on the way.
    """
    layers = params["layers"]
    with progress_bar("Quantising to int8", len(layers) + 1, "layer") as bar:
        for layer in layers:
            for name in MATRICES:
                layer[name] = quantize(layer[name])
            bar.update()
        params["head"] = quantize(params.get("head", params["embed"]))
        bar.update()
    return params


def quantized_shapes(shapes: Params) -> Params:
    """What `quantize_params` makes of a tree of ShapeDtypeStructs.

    Raises ValueError for models with experts or latent attention.
    """
    for layer in shapes["layers"]:
        missing = [name for name in MATRICES if name not in layer]
        if missing:
            what = "latent attention" if "qkv" in missing else "experts"
            raise ValueError(f"quantization int8 is not supported for models with {what}")

    def pair(leaf: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return (
            jax.ShapeDtypeStruct(leaf.shape, jnp.int8),
            jax.ShapeDtypeStruct(leaf.shape[:1], jnp.float32),
        )

    layers = [
        {name: pair(leaf) if name in MATRICES else leaf for name, leaf in layer.items()}
        for layer in shapes["layers"]
    ]
    head = pair(shapes.get("head", shapes["embed"]))
    return {**shapes, "layers": layers, "head": head}
