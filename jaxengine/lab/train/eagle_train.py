"""Training of an EAGLE-3 head (`runner.draft.eagle_layer`) over text that the target wrote.

As in the publication the head is trained for what it meets when it drafts: from every chosen
position a chain of drafts goes out. The first reads the target's states, every next one the
output of the one before; attention sees the target's states up to the chain's beginning, and the
chain itself behind them. The loss is the cross entropy with the target's own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxengine.lab.train.draft_data import Corpus
from jaxengine.lab.train.draft_train import (
    STEP_DECAY,
    Acceptance,
    Progress,
    TrainSettings,
    fit,
    followed,
)
from jaxengine.models.decoder import head
from jaxengine.models.layers.linear import linear
from jaxengine.models.layers.parallel import lookup
from jaxengine.models.layers.rope import apply_rope, rope_tables
from jaxengine.models.spec import DecoderSpec, Params, RopeSpec
from jaxengine.parallel.layout import StepLayout
from jaxengine.runner.draft.eagle_layer import (
    EagleForm,
    default_taps,
    draft_logits,
    eagle_shapes,
    joined,
    layer_inputs,
    layer_output,
)

CHAINS = 64  # of a text in one step
_EVAL_CHAINS = 128


class Batch(NamedTuple):
    """B texts of at most T tokens, M chains from each, K drafts long. A chain from position t
    reads the target's states up to t and drafts the tokens t + 2 to t + 1 + K."""

    features: Float[Array, "B T F"]
    tokens: Int[Array, "B T"]
    chains: Int[Array, "B M"]  # t
    used: Float[Array, "B M"]  # 0: there are fewer chains
    wanted: Float[Array, "B M K D"]  # the target's final states that choose the drafts' tokens
    log_sum: Float[Array, "B M K"]


def form_for(target: DecoderSpec, ffn_size: int, draft_vocab_size: int) -> EagleForm:
    """A head with the target's own heads and positions. Raises ValueError for targets whose
    attention is of another kind."""
    if target.mla is not None or target.groups[0] != 0 or target.layer_rope(0) is None:
        raise ValueError(
            f"--features 3 needs a model with full attention and plain keys and values, which "
            f"{target.family} has not: take --features 1"
        )
    spec = DecoderSpec(
        family="llama",
        vocab_size=target.vocab_size,
        num_layers=1,
        hidden_size=target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        ffn_size=ffn_size or target.ffn_size,
        max_position=target.max_position,
        norm_eps=target.norm_eps,
        rope=RopeSpec(theta=target.rope.theta),
    )
    return EagleForm(spec, target.hidden_size, draft_vocab_size, default_taps(target.num_layers))


def init_leaves(
    form: EagleForm, target: DecoderSpec, final_norm: NDArray[Any], seed: int
) -> dict[str, NDArray[np.float32]]:
    """Fresh weights: the layer passes the target's latest states on, which its output head can
    nearly read."""
    rng = np.random.default_rng(seed)
    leaves: dict[str, NDArray[np.float32]] = {}
    for name, shape in eagle_shapes(form).items():
        if len(shape) == 1:
            leaves[name] = np.ones(shape, np.float32)
        elif name in ("o", "down"):
            leaves[name] = np.zeros(shape, np.float32)
        else:
            scale = 1.0 / np.sqrt(shape[1])
            leaves[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    width = form.spec.hidden_size
    leaves["fc"] *= 0.1
    leaves["fc"][:, -width:] += np.eye(width, dtype=np.float32)
    plus_one = 1.0 if target.norm_plus_one else 0.0
    leaves["out_norm"] = (np.asarray(final_norm) + plus_one).astype(np.float32)
    return leaves


def chain_logits(
    form: EagleForm,
    params: Params,
    features: Float[Array, "T F"],
    tokens: Int[Array, "T"],
    chains: Int[Array, "M"],
    drafts: int,
    teacher: bool,
) -> list[Float[Array, "M v"]]:
    """Logits of every chain's drafts, from the first on. With `teacher` a draft reads the text's
    tokens, else the drafts before it."""
    spec = form.spec
    states = joined(form, params, features.astype(jnp.float32))
    # The token behind the last one is never read: no chain begins there.
    behind = jnp.concatenate([tokens[1:], tokens[-1:]])
    place = jnp.arange(tokens.shape[0])
    x, residual = layer_inputs(form, params, _embedded(params, behind), states)
    _, keys, values = _heads(spec, params, x, place)
    earlier = place <= chains[:, None]
    own_keys: list[Array] = []
    own_values: list[Array] = []
    logits: list[Array] = []
    x, residual = x[chains], residual[chains]
    for j in range(drafts):
        query, key, value = _heads(spec, params, x, chains + j)
        if j:
            own_keys.append(key)
            own_values.append(value)
        attended = _attend(spec, query, keys, values, earlier, own_keys, own_values)
        state = layer_output(form, params, residual, attended)
        logits.append(draft_logits(form, params, state))
        if j + 1 < drafts:
            following = jnp.minimum(chains + 2 + j, tokens.shape[0] - 1)
            ids = tokens[following] if teacher else params["vocab_ids"][logits[-1].argmax(-1)]
            x, residual = layer_inputs(form, params, _embedded(params, ids), state)
    return logits


def _embedded(params: Params, ids: Int[Array, "T"]) -> Float[Array, "T D"]:
    return lookup(params["embed"], ids, StepLayout())


def _heads(
    spec: DecoderSpec, params: Params, x: Float[Array, "T I"], position: Int[Array, "T"]
) -> tuple[Array, Array, Array]:
    """Queries [T, G, R, C] (R heads share keys), keys and values [T, G, C]."""
    heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = linear(x, params["qkv"], params.get("qkv_bias"))
    q, k, v = jnp.split(qkv, [heads * dim, (heads + groups) * dim], axis=-1)
    tables = rope_tables(spec.rope, dim, position)
    q = apply_rope(q.reshape(-1, heads, dim), *tables)
    k = apply_rope(k.reshape(-1, groups, dim), *tables)
    return q.reshape(-1, groups, heads // groups, dim), k, v.reshape(-1, groups, dim)


def _attend(
    spec: DecoderSpec,
    query: Float[Array, "M G R C"],
    keys: Float[Array, "T G C"],
    values: Float[Array, "T G C"],
    earlier: Array,
    own_keys: Sequence[Float[Array, "M G C"]],
    own_values: Sequence[Float[Array, "M G C"]],
) -> Float[Array, "M HC"]:
    """Every chain over the text before it and over itself."""
    scale = spec.attention_scale
    scores = jnp.einsum("mgrc,tgc->mgrt", query, keys) * scale
    scores = jnp.where(earlier[:, None, None, :], scores, -jnp.inf)
    own = [jnp.einsum("mgrc,mgc->mgr", query, key)[..., None] * scale for key in own_keys]
    weights = jax.nn.softmax(jnp.concatenate([scores, *own], -1), -1)
    count = keys.shape[0]
    out = jnp.einsum("mgrt,tgc->mgrc", weights[..., :count], values)
    for j, value in enumerate(own_values):
        out = out + weights[..., count + j, None] * value[:, :, None, :]
    return out.reshape(out.shape[0], -1)


def train_eagle(
    form: EagleForm,
    target_spec: DecoderSpec,
    frozen: Params,
    leaves: dict[str, NDArray[Any]],
    corpus: Corpus,
    drafts: int,
    settings: TrainSettings,
    checkpoints: Path | None = None,
    *,
    progress: bool = True,
) -> tuple[dict[str, NDArray[np.float32]], Progress]:
    """Train the leaves; returns them and the run's record. `frozen` are `embed`, `head` (its rows
    of the draft tokens) and `vocab_ids`; `settings.batch_size` counts texts.

    Raises ValueError when no text is long enough, FloatingPointError when the loss is no longer a
    number.
    """
    texts = np.array([i for i in range(corpus.num_texts) if len(_chains(corpus, i, drafts))])
    if not len(texts):
        raise ValueError(f"no text is long enough for {drafts} drafts: generate longer texts")
    length = _longest(corpus)

    def gather(chosen: NDArray[np.int64], step: int) -> Batch:
        rng = np.random.default_rng((settings.seed, step))
        return _batch(corpus, chosen.tolist(), length, drafts, rng)

    def loss(params: Params, batch: Batch, _: Array) -> Array:
        def of_text(features: Array, tokens: Array, chains: Array) -> Array:
            return jnp.stack(
                chain_logits(form, params, features, tokens, chains, drafts, teacher=True), 1
            )

        logits = jax.vmap(of_text)(batch.features, batch.tokens, batch.chains)
        wanted = batch.wanted.astype(jnp.float32)
        rows = wanted.reshape(-1, wanted.shape[-1])
        target = head(target_spec, {"head": params["head"]}, rows).reshape(logits.shape)
        target = jnp.exp(target - batch.log_sum[..., None])
        entropy = -jnp.sum(target * jax.nn.log_softmax(logits), -1)  # [B, M, K]
        share = jnp.asarray([STEP_DECAY**j for j in range(drafts)]) * batch.used[..., None]
        return (entropy * share).sum() / share.sum()

    return fit(loss, frozen, leaves, texts, gather, settings, checkpoints, progress=progress)


def evaluate_eagle(form: EagleForm, params: Params, corpus: Corpus, drafts: int) -> Acceptance:
    """As `draft_train.evaluate`. `params` are all of the head's, with `vocab_ids`."""
    length, right = _longest(corpus), []

    @jax.jit
    def run(params: Params, features: Array, tokens: Array, chains: Array) -> Array:
        logits = chain_logits(form, params, features, tokens, chains, drafts, teacher=False)
        return params["vocab_ids"][jnp.stack(logits, 1).argmax(-1)]

    for text in range(corpus.num_texts):
        places, begin = _chains(corpus, text, drafts), int(corpus.start[text])
        for first in range(0, len(places), _EVAL_CHAINS):
            part = places[first : first + _EVAL_CHAINS]
            padded = np.resize(part, _EVAL_CHAINS) - begin
            features, tokens = _text(corpus, text, length)
            got = np.asarray(run(params, features, tokens, padded))[: len(part)]
            ahead = part[:, None] + 1 + np.arange(drafts)
            right.append((got == corpus.best[ahead]) & followed(corpus, ahead))
    if not right:
        raise ValueError(f"no held-out text is long enough for {drafts} drafts")
    accepted = np.cumprod(np.concatenate(right), axis=1)
    return Acceptance(tuple(float(x) for x in accepted.mean(axis=0)), len(accepted))


def _longest(corpus: Corpus) -> int:
    return int(np.diff(corpus.start).max())


def _chains(corpus: Corpus, text: int, drafts: int) -> NDArray[np.int64]:
    """`Corpus.windows` of one text: positions in the corpus."""
    begin, end = int(corpus.start[text]), int(corpus.start[text + 1])
    return np.arange(begin + int(corpus.num_prompt[text]) - 1, end - 1 - drafts)


def _text(corpus: Corpus, text: int, length: int) -> tuple[NDArray[np.float16], NDArray[np.int32]]:
    """(states inside of the target [length, F], tokens [length]), padded at the end."""
    assert corpus.tapped is not None
    begin, end = int(corpus.start[text]), int(corpus.start[text + 1])
    pad = length - (end - begin)
    features = np.pad(corpus.tapped[begin:end], ((0, pad), (0, 0)))
    return features, np.pad(corpus.tokens[begin:end], (0, pad))


def _batch(
    corpus: Corpus, texts: list[int], length: int, drafts: int, rng: np.random.Generator
) -> Batch:
    columns = []
    for text in texts:
        places = _chains(corpus, text, drafts)
        chosen = rng.choice(places, min(CHAINS, len(places)), replace=False)
        used = (np.arange(CHAINS) < len(chosen)).astype(np.float32)
        chosen = np.resize(chosen, CHAINS)
        ahead = chosen[:, None] + 1 + np.arange(drafts)
        features, tokens = _text(corpus, text, length)
        place = (chosen - corpus.start[text]).astype(np.int32)
        columns.append((features, tokens, place, used, corpus.hidden[ahead], corpus.log_sum[ahead]))
    return Batch(*(np.stack(column) for column in zip(*columns, strict=True)))  # type: ignore[arg-type]
