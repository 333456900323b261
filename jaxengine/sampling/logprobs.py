"""Log-probabilities, ranks and the best K of a row, for sampled tokens and for prompts."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jaxengine.sampling.blocks import block_max, pad_vocab, row_sum, top_k
from jaxengine.sampling.inputs import MIN_LOGPROB


def token_logprobs(
    logits: Array, maxima: Array, tokens: Array, num_logprobs: int
) -> tuple[Array, Array, Array]:
    """Of padded logits [S, V'] and tokens [S]: ids [S, 1+K], logprobs [S, 1+K], ranks [S].

    The token itself comes first, then the K best. The rank is the number of tokens whose logit
    is >= the token's. Values are finite: -inf and NaN become MIN_LOGPROB.
    """
    token = jnp.clip(tokens, 0, logits.shape[1] - 1)[:, None]
    own = jnp.take_along_axis(logits, token, 1, mode="promise_in_bounds")
    top = maxima.max(-1, keepdims=True)
    log_total = jnp.log(row_sum(jnp.exp(logits - top)))[:, None] + top
    values, ids = own, token
    if num_logprobs > 0:
        best, best_ids = top_k(logits, maxima, num_logprobs)
        values = jnp.concatenate([own, best], 1)
        ids = jnp.concatenate([token, best_ids], 1)
    logprobs = values - log_total
    logprobs = jnp.where(logprobs >= MIN_LOGPROB, logprobs, MIN_LOGPROB)
    ranks = row_sum(jnp.where(logits >= own, 1.0, 0.0)).astype(jnp.int32)
    return ids.astype(jnp.int32), logprobs, ranks


def prompt_logprobs(
    hidden: Array,
    targets: Array,
    head_fn: Callable[[Array], Array],
    num_logprobs: int,
    chunk: int = 32,
) -> tuple[Array, Array, Array]:
    """Log-probabilities of `targets` [T] after the positions of `hidden` [T, D].

    `head_fn` maps [chunk, D] to logits [chunk, V]; only one chunk's logits exist at a time.
    Returns ids [T, 1+K], logprobs [T, 1+K] and ranks [T] as `token_logprobs` does. The entries
    of targets out of the vocabulary (padding) mean nothing, and are finite.
    """
    count, width = hidden.shape
    chunk = min(chunk, count)
    extra = -count % chunk
    hidden = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, chunk, width)
    targets = jnp.pad(targets, (0, extra)).reshape(-1, chunk)

    def one(args: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        rows, wanted = args
        logits = head_fn(rows).astype(jnp.float32)
        k = min(num_logprobs, logits.shape[1])
        wanted = jnp.clip(wanted, 0, logits.shape[1] - 1)
        padded = pad_vocab(logits)
        return token_logprobs(padded, block_max(padded), wanted, k)

    ids, logprobs, ranks = lax.map(one, (hidden, targets))
    k = ids.shape[-1]
    return ids.reshape(-1, k)[:count], logprobs.reshape(-1, k)[:count], ranks.reshape(-1)[:count]
