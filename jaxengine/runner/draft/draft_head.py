"""A recurrent draft head on the target's final hidden states.

The idea is EAGLE's (Li et al., 2024): draft in the target's feature space, from the hidden state
at position t and the token at t + 1, and read the result with the target's own output head. The
layer here has no attention: the target's state already holds the context, and a drafter without
a KV cache has nothing to keep in step under preemption, prefix hits or rejected drafts. Its only
state is one hidden row a sequence, which the next draft step takes in the target's place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.norm import rms_norm
from jaxengine.models.layers.parallel import lookup
from jaxengine.parallel.layout import StepLayout

DraftParams = dict[str, Any]
ARCHITECTURE = "recurrent-head"


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft head, and the target that it belongs to.

    D width and V vocabulary are the target's; v <= V tokens can be drafted, F is the head's ffn
    width. `fingerprint` is `jaxengine.weights.fingerprint` of the target.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    ffn_size: int  # F
    num_layers: int
    draft_vocab_size: int  # v
    trained_drafts: int  # draft steps in a row that it was trained for
    norm_eps: float = 1e-5
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    target: str = ""
    fingerprint: str = ""
    architecture: str = ARCHITECTURE


def head_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """The trained leaves; matrices are [out, in]."""
    width, ffn = config.hidden_size, config.ffn_size
    shapes: dict[str, tuple[int, ...]] = {
        "token_norm": (width,),
        "hidden_norm": (width,),
        "join": (width, 2 * width),
        "out_norm": (width,),
    }
    for i in range(config.num_layers):
        shapes[f"norm_{i}"] = (width,)
        shapes[f"gate_up_{i}"] = (2 * ffn, width)
        shapes[f"down_{i}"] = (width, ffn)
    return shapes


def init_params(config: DraftConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Fresh weights. Every layer starts as the identity (its `down` is zero)."""
    rng = np.random.default_rng(seed)
    params: dict[str, NDArray[np.float32]] = {}
    for name, shape in head_shapes(config).items():
        if "norm" in name:
            params[name] = np.ones(shape, np.float32)
        elif name.startswith("down"):
            params[name] = np.zeros(shape, np.float32)
        else:
            scale = 1.0 / np.sqrt(shape[-1])
            params[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    return params


def attach(
    head: dict[str, Any], vocab_ids: NDArray[np.int32], target: dict[str, Any], dtype: Any = None
) -> DraftParams:
    """The parameters that `draft_step` takes: the trained leaves, with the target's embedding table
    and the rows of its output head that can be drafted.

    `target` is the engine's parameter tree (its head may be 8-bit). Matrices are cast to `dtype`,
    by default the embedding's. On one device; a sharded target must be gathered first.
    """
    rows = jnp.asarray(vocab_ids)
    table = target["embed"]
    full = target.get("head", table)
    wanted = table.dtype if dtype is None else dtype
    params: DraftParams = {
        name: jnp.asarray(leaf, jnp.float32 if "norm" in name else wanted)
        for name, leaf in head.items()
    }
    params["embed"] = table
    params["vocab_ids"] = rows
    params["head"] = tuple(part[rows] for part in full) if isinstance(full, tuple) else full[rows]
    return params


def draft_step(
    config: DraftConfig,
    params: DraftParams,
    hidden: Float[Array, "S D"],
    tokens: Int[Array, "S"],
) -> tuple[Float[Array, "S v"], Float[Array, "S D"]]:
    """Float32 logits of the token after `tokens`, and the hidden state of the next draft step.

    `hidden` is the target's final-normed state at the position before `tokens` for the first
    draft, and what the last call returned for the ones after it. Column j of the logits is token
    `params["vocab_ids"][j]`. Pure; runs inside jit.
    """
    new = hidden_step(config, params, hidden, tokens)
    logits = linear(new, params["head"])
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    if config.logit_soft_cap:
        logits = jnp.tanh(logits / config.logit_soft_cap) * config.logit_soft_cap
    return logits, new


def hidden_step(
    config: DraftConfig,
    params: DraftParams,
    hidden: Float[Array, "S D"],
    tokens: Int[Array, "S"],
) -> Float[Array, "S D"]:
    """The predicted final-normed state of the target at the position of `tokens`, float32."""
    eps = config.norm_eps
    token = rms_norm(lookup(params["embed"], tokens, StepLayout()), params["token_norm"], eps)
    state = rms_norm(hidden.astype(jnp.float32), params["hidden_norm"], eps)
    x = linear(jnp.concatenate([token, state], -1), params["join"])
    for i in range(config.num_layers):
        both = linear(rms_norm(x, params[f"norm_{i}"], eps), params[f"gate_up_{i}"])
        gate, up = jnp.split(both, 2, -1)
        x = x + linear(jax.nn.silu(gate) * up, params[f"down_{i}"])
    return rms_norm(x, params["out_norm"], eps)


def draft_greedy(
    config: DraftConfig,
    params: DraftParams,
    hidden: Float[Array, "S D"],
    tokens: Int[Array, "S"],
    count: int,
) -> Int[Array, "S count"]:
    """`count` greedy drafts after `tokens`, as the target's token ids."""
    drafts = []
    for _ in range(count):
        logits, hidden = draft_step(config, params, hidden, tokens)
        tokens = params["vocab_ids"][jnp.argmax(logits, -1)]
        drafts.append(tokens)
    return jnp.stack(drafts, -1)
