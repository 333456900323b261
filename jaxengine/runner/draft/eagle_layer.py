"""Draft heads of one decoder layer, as published: EAGLE (Li et al., 2024), EAGLE-3 (2025).

They draft as `runner.draft.layer_chain` says. EAGLE is told the target's final hidden state;
EAGLE-3 the states inside of three layers, joined by one matrix, and it has an output head of its
own over the tokens that it can draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.models.decoder import KV, LayerKind, all_rope_tables, attention, with_work
from jaxengine.models.layers.attention import AttentionPlan
from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.mlp import mlp
from jaxengine.models.layers.norm import rms_norm
from jaxengine.models.layers.parallel import lookup
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.parallel.layout import StepLayout
from jaxengine.runner.draft.drafter import Drafter
from jaxengine.runner.draft.layer_chain import Layer, chain_drafter
from jaxengine.runner.forward import StepConfig
from jaxengine.sampling.blocks import argmax, block_max, pad_vocab

_PLAIN = LayerKind(window=0, group=0, experts=False)
_ONE_DEVICE = StepLayout()


@dataclass(frozen=True)
class EagleForm:
    """The static properties of a head. `spec`: its one layer, of width D and vocabulary V.

    `taps`: after how many layers of the target (width E) its states are read, for EAGLE-3; for
    EAGLE none. v tokens can be drafted. `norm_before_residual`: the residual sum starts from the
    normed state.
    """

    spec: DecoderSpec
    target_width: int  # E
    draft_vocab_size: int  # v
    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False

    @property
    def is_eagle3(self) -> bool:
        return bool(self.taps)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers at which EAGLE-3 reads a target of `num_layers`: early, in the middle and late.
    Raises ValueError for one that has no three places."""
    if num_layers < 3:
        raise ValueError(f"EAGLE-3 reads 3 layers, the model has {num_layers}")
    if num_layers < 7:  # the published places would coincide
        return 1, (1 + num_layers) // 2, num_layers
    return 2, num_layers // 2, num_layers - 3


def eagle_shapes(form: EagleForm) -> dict[str, tuple[int, ...]]:
    """The leaves of a head that need not be there twice, [out, in]: besides them `embed` [V, D],
    `head` [v, D] and `vocab_ids` [v] may be its own or the target's."""
    spec = form.spec
    width, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    rows = heads + 2 * spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (width, len(form.taps) * form.target_width if form.taps else 2 * width),
        "qkv": (rows, 2 * width if form.taps else width),
        "o": (width, heads),
        "gate_up": (2 * spec.ffn_size, width),
        "down": (width, spec.ffn_size),
        "mlp_norm": (width,),
    }
    if spec.qkv_bias:
        shapes["qkv_bias"] = (rows,)
    if form.taps:
        shapes |= dict.fromkeys(("token_norm", "state_norm", "out_norm"), (width,))
    return shapes


def joined(form: EagleForm, params: Params, features: Float[Array, "T F"]) -> Float[Array, "T D"]:
    """The layer's input, taken from the target."""
    if not form.is_eagle3:
        return features
    return linear(features, params["fc"], params.get("fc_bias"))


def layer_inputs(
    form: EagleForm, params: Params, token: Float[Array, "T D"], state: Float[Array, "T D"]
) -> tuple[Float[Array, "T I"], Float[Array, "T D"]]:
    """(what attention reads, where the residual sum starts). `token` are embeddings."""
    if not form.is_eagle3:
        x = linear(jnp.concatenate([token, state], -1), params["fc"], params.get("fc_bias"))
        return x, x
    eps = form.spec.norm_eps
    normed = rms_norm(state, params["state_norm"], eps)
    both = jnp.concatenate([rms_norm(token, params["token_norm"], eps), normed], -1)
    return both, normed if form.norm_before_residual else state


def layer_output(
    form: EagleForm, params: Params, residual: Float[Array, "T D"], attended: Float[Array, "T HC"]
) -> Float[Array, "T D"]:
    """The layer's output, which the next draft takes in the place of what `joined` gives."""
    x = residual + linear(attended, params["o"])
    normed = rms_norm(x, params["mlp_norm"], form.spec.norm_eps)
    return x + mlp(params, normed, form.spec.activation, _ONE_DEVICE)


def draft_logits(
    form: EagleForm, params: Params, hidden: Float[Array, "S D"]
) -> Float[Array, "S v"]:
    """Float32 logits of the layer's output; column j is token `vocab_ids[j]`, or j without."""
    if form.is_eagle3:
        hidden = rms_norm(hidden, params["out_norm"], form.spec.norm_eps)
    return linear(hidden, params["head"])


def run_layer(
    form: EagleForm,
    step: StepConfig,
    params: Params,
    kv: KV,
    ids: Int[Array, "T"],
    state: Float[Array, "T D"],
    plan: AttentionPlan,
) -> tuple[Float[Array, "T D"], KV]:
    """The layer over states of the target, or its own, and the tokens behind them."""
    spec, layout = form.spec, step.layout
    token = lookup(params["embed"], ids, layout)
    x, residual = layer_inputs(form, params, token, state)
    plan = with_work(spec, layout, plan, kv)
    rope = spec.layer_rope(0)
    tables = None if rope is None else all_rope_tables(spec, plan.positions)[rope]
    attended, cache = attention(spec, layout, _PLAIN, x, params, kv[0], plan, tables)
    return layer_output(form, params, residual, attended), (cache,)


def layer_drafter(
    form: EagleForm,
    step: StepConfig,
    params: Params,
    kv: KV,
    load: Callable[[Params], Params],
) -> Drafter:
    """`step` is the layer's own; `params` and `kv` are shapes; `load` gets the target's
    parameters."""

    def guess(params: Params, state: Float[Array, "S D"]) -> Int[Array, "S"]:
        logits = pad_vocab(draft_logits(form, params, state))
        tokens = argmax(logits, block_max(logits)).astype(jnp.int32)
        return params["vocab_ids"][tokens] if "vocab_ids" in params else tokens

    layer = Layer(partial(joined, form), partial(run_layer, form, step), guess)
    return chain_drafter("eagle", layer, step, params, kv, load)
