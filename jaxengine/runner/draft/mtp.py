"""Multi-token prediction with the checkpoint's own extra layer (DeepSeek-AI, 2024).

Behind its L layers a model may have one more that was trained to guess a token further, from the
target's final hidden state. It drafts as `runner.draft.layer_chain` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxengine.models.decoder import KV, decode, embed
from jaxengine.models.layers.attention import AttentionPlan
from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.norm import rms_norm
from jaxengine.models.params import Leaf, layer_leaves
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.parallel.layout import Stage
from jaxengine.runner.draft.drafter import Drafter
from jaxengine.runner.draft.layer_chain import Layer, chain_drafter
from jaxengine.runner.draft.second_model import greedy
from jaxengine.runner.forward import StepConfig
from jaxengine.weights.resolve import ModelFiles

NUM_LAYERS = "num_nextn_predict_layers"  # in config.json
_LAST = Stage(1, 2)  # of one layer: takes hidden states, gives final-normed ones
_PREFIX = "model.layers.{i}."


def extra_layer(spec: DecoderSpec, files: ModelFiles) -> DecoderSpec:
    """The target's spec with its extra layer counted. Raises ValueError when there is none."""
    count = (files.config or {}).get(NUM_LAYERS) or 0
    if spec.family != "deepseek_v3" or count != 1:
        raise ValueError(
            f"speculative_config.method mtp is for DeepSeek-V3 checkpoints with {NUM_LAYERS} 1; "
            f"{files.name} is {spec.family} with {count}"
        )
    windows = (*spec.windows, 0) if spec.windows else ()
    return replace(spec, num_layers=spec.num_layers + 1, windows=windows)


def one_layer(spec: DecoderSpec) -> DecoderSpec:
    """A model of the last layer alone."""
    last = spec.num_layers - 1
    dense = () if spec.is_moe(last) else (0,)
    return replace(
        spec, num_layers=1, windows=spec.windows[last:], dense_layers=dense, no_rope_layers=()
    )


def mtp_leaves(spec: DecoderSpec) -> dict[str, tuple[Leaf, str]]:
    """Leaves in addition to the decoder layer's, and their names in a checkpoint."""
    width, table = spec.hidden_size, Leaf((spec.vocab_size, spec.hidden_size))
    norm = Leaf((width,))
    return {
        "embed": (table, _PREFIX + "embed_tokens.weight"),
        "head": (table, _PREFIX + "shared_head.head.weight"),
        "head_norm": (norm, _PREFIX + "shared_head.norm.weight"),
        "token_norm": (norm, _PREFIX + "enorm.weight"),
        "hidden_norm": (norm, _PREFIX + "hnorm.weight"),
        "join": (Leaf((width, 2 * width)), _PREFIX + "eh_proj.weight"),
    }


def mtp_shapes(extended: DecoderSpec, dtype: Any) -> Params:
    """ShapeDtypeStructs of the extra layer's parameters: {"layers": [...], "embed", "head", "join",
    norms}."""

    def struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, np.float32 if leaf.wide else dtype)

    layer = layer_leaves(extended, extended.num_layers - 1)
    params: Params = {name: struct(leaf) for name, (leaf, _) in mtp_leaves(extended).items()}
    params["layers"] = [{name: struct(leaf) for name, leaf in layer.items()}]
    return params


def mtp_drafter(
    step: StepConfig, params: Params, kv: KV, load: Callable[[Params], Params]
) -> Drafter:
    """`step` is the layer's own (of `one_layer`); `params` and `kv` are shapes; `load` gets the
    target's parameters."""

    def guess(params: Params, hidden: Float[Array, "S D"]) -> Int[Array, "S"]:
        out = rms_norm(hidden, params["head_norm"], step.spec.norm_eps)
        return greedy(step.spec, params, out, step.spec.vocab_size)

    layer = Layer(lambda params, features: features, partial(run_layer, step), guess)
    return chain_drafter("mtp", layer, step, params, kv, load)


def run_layer(
    step: StepConfig,
    params: Params,
    kv: KV,
    ids: Int[Array, "T"],
    hidden: Float[Array, "T D"],
    plan: AttentionPlan,
) -> tuple[Float[Array, "T D"], KV]:
    """The layer over the target's hidden states and the tokens behind them. Its output is scaled
    to a mean square of 1: both norms that read it would do that themselves."""
    spec = step.spec
    token = rms_norm(embed(spec, params, ids, step.layout), params["token_norm"], spec.norm_eps)
    state = rms_norm(hidden, params["hidden_norm"], spec.norm_eps)
    x = linear(jnp.concatenate([token, state], -1), params["join"])
    plain = {"layers": params["layers"], "final_norm": jnp.ones((spec.hidden_size,), jnp.float32)}
    return decode(spec, plain, kv, x, plan, step.layout, _LAST)
