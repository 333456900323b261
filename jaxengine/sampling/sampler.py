"""The sampler: float32 logits in, token ids out, in the second of a step's two programs.

Order (engine-behaviour 8.2): grammar mask; raw log-probabilities; allow lists; bad words;
min_tokens and logit_bias; penalties; argmax for greedy rows; temperature; min-p; top-k; top-p;
draw; gather of log-probabilities. A feature that no row uses costs nothing at run time.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxengine.sampling.blocks import argmax, block_max, pad_vocab
from jaxengine.sampling.draw import draw
from jaxengine.sampling.inputs import SampleOutput, SamplingInputs, is_greedy
from jaxengine.sampling.logprobs import token_logprobs
from jaxengine.sampling.processors import apply_grammar, needs_processing, process


def sample(
    logits: Array, inputs: SamplingInputs, num_logprobs: int, *, greedy_only: bool = False
) -> SampleOutput:
    """One token for each valid row of float32 logits [S, V].

    `num_logprobs` is K of the output (static; cut to V; 0 = the sampled token's alone).
    `greedy_only` (static) leaves out everything but grammar, argmax and log-probabilities: a
    program a tenth the size, for steps in which `needs_full(inputs)` is False on the host.
    Traceable, with no host synchronisation. Each row's result is a function of that row alone,
    bit for bit.
    """
    count, vocab = logits.shape
    num_logprobs = min(num_logprobs, vocab)
    logits = pad_vocab(logits)
    maxima = block_max(logits)
    best = maxima.max(-1)
    broken = jnp.isnan(best) | (best == jnp.inf)
    if inputs.grammar is not None:
        mask = inputs.grammar

        def masked() -> tuple[Array, Array]:
            legal = apply_grammar(logits, mask)
            return legal, block_max(legal)

        use = jnp.bool_(True) if inputs.use_grammar is None else inputs.use_grammar
        logits, maxima = lax.cond(use, masked, lambda: (logits, maxima))
        best = maxima.max(-1)
    sampling = inputs.valid & ~is_greedy(inputs) & ~broken

    def plain() -> tuple[Array, Array]:
        return argmax(logits, maxima), best

    def full() -> tuple[Array, Array]:
        changed = lax.cond(
            needs_processing(inputs), lambda x: process(x, inputs, vocab), lambda x: x, logits
        )
        peaks = block_max(changed)
        greedy = argmax(changed, peaks)
        drawn = lax.cond(
            sampling.any(),
            lambda: draw(changed, peaks, inputs, sampling, vocab),
            lambda: greedy,
        )
        return jnp.where(sampling, drawn, greedy), peaks.max(-1)

    if greedy_only:
        ids, best = plain()
    else:
        ids, best = lax.cond(sampling.any() | needs_processing(inputs), full, plain)
    good = inputs.valid & ~broken & jnp.isfinite(best)
    wanted = good & inputs.want_logprobs

    def with_logprobs() -> tuple[Array, Array, Array]:
        token_ids, values, ranks = token_logprobs(logits, maxima, ids, num_logprobs)
        return (
            jnp.where(wanted[:, None], token_ids, 0),
            jnp.where(wanted[:, None], values, 0.0),
            jnp.where(wanted, ranks, 0),
        )

    shape = (count, 1 + num_logprobs)
    logprob_ids, logprobs, ranks = lax.cond(
        wanted.any(),
        with_logprobs,
        lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(count, jnp.int32)),
    )
    return SampleOutput(
        token_ids=jnp.where(good, ids, -1).astype(jnp.int32),
        bad_rows=inputs.valid & ~good,
        logprob_ids=logprob_ids,
        logprobs=logprobs,
        ranks=ranks,
    )


def needs_full(inputs: SamplingInputs) -> bool:
    """On the host (NumPy inputs): some row draws, or has an edit, bad word or penalty."""
    return bool((inputs.valid & ~is_greedy(inputs)).any() | needs_processing(inputs))
