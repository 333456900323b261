"""Changes to the logits before a token is chosen: grammar, allow lists, bans, bias, penalties."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxengine.sampling.blocks import block_max
from jaxengine.sampling.inputs import (
    EDIT_ADD,
    EDIT_ALLOW,
    EDIT_BAN,
    EDIT_MIN_TOKENS,
    SamplingInputs,
    has_edits,
    has_penalty,
)

HISTORY_CHUNK = 256  # history tokens counted at a time; the loop ends at the longest row


def apply_grammar(logits: Array, bitmask: Array) -> Array:
    """[S, V'] logits, -inf where the bit of `bitmask` [S, ceil(V / 32)] is 0."""
    rows, width = logits.shape
    bits = (bitmask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    legal = bits.reshape(rows, -1)[:, :width] == 1
    short = width - legal.shape[1]  # the padding of the vocabulary is -inf already
    if short > 0:
        legal = jnp.pad(legal, ((0, 0), (0, short)))
    return jnp.where(legal, logits, -jnp.inf)


def _bad_word_hits(inputs: SamplingInputs) -> Array:
    """[B] the output of the bad word's row ends with the word's prefix."""
    rows = inputs.valid.shape[0]
    row = jnp.minimum(inputs.bad_row, rows - 1)
    length = (inputs.bad_prefix >= 0).sum(-1)
    start = inputs.num_tokens[row] - length
    offset = jnp.arange(inputs.bad_prefix.shape[1])
    past = inputs.history.at[inputs.slot[row][:, None], start[:, None] + offset].get(mode="clip")
    same = (past == inputs.bad_prefix) | (inputs.bad_prefix < 0)
    return same.all(-1) & (start >= inputs.num_prompt[row]) & (inputs.bad_row < rows)


def _apply_edits(logits: Array, inputs: SamplingInputs, vocab: int) -> Array:
    rows = logits.shape[0]

    def rows_where(wanted: Array, row: Array, token: Array) -> Array:
        ok = wanted & (row >= 0) & (token >= 0) & (token < vocab)
        return jnp.where(ok, row, rows)  # out of range: dropped

    row, token, kind = inputs.edit_row, inputs.edit_token, inputs.edit_kind
    if inputs.allow_mask is not None:
        mask = inputs.allow_mask.at[inputs.slot].get(mode="fill", fill_value=-1)
        out = apply_grammar(logits, jnp.where(inputs.allow_row[:, None], mask, -1))
    else:
        out = jnp.where(inputs.allow_row[:, None], -jnp.inf, logits)
        allow = rows_where(kind == EDIT_ALLOW, row, token)
        kept = logits.at[allow, token].get(mode="fill", fill_value=-jnp.inf)
        out = out.at[allow, token].set(kept, mode="drop")

    bans = rows_where(_bad_word_hits(inputs), inputs.bad_row, inputs.bad_last)
    adds = rows_where((kind == EDIT_ADD) | (kind == EDIT_BAN), row, token)
    value = jnp.where(kind == EDIT_BAN, -jnp.inf, inputs.edit_value)
    out = out.at[jnp.concatenate([adds, bans]), jnp.concatenate([token, inputs.bad_last])].add(
        jnp.concatenate([value, jnp.full(bans.shape, -jnp.inf)]), mode="drop"
    )

    def min_tokens(out: Array) -> Array:
        active = inputs.min_tokens_active.at[row].get(mode="fill", fill_value=False)
        stop = rows_where((kind == EDIT_MIN_TOKENS) & active, row, token)
        fewer = out.at[stop, token].set(-jnp.inf, mode="drop")
        # where only stop tokens are legal (a finished grammar) min_tokens yields
        empty = block_max(fewer).max(-1, keepdims=True) == -jnp.inf
        return jnp.where(empty, out, fewer)

    any_stop = (kind == EDIT_MIN_TOKENS).any()
    result: Array = lax.cond(any_stop, min_tokens, lambda out: out, out)
    return result


def _apply_penalties(logits: Array, inputs: SamplingInputs) -> Array:
    rows, width = logits.shape
    chunk = min(HISTORY_CHUNK, inputs.history.shape[1])
    length = jnp.where(has_penalty(inputs), inputs.num_tokens, 0)

    def count(step: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
        anywhere, output = counts
        position = step * chunk + jnp.arange(chunk)[None, :]
        token = inputs.history.at[inputs.slot[:, None], position].get(mode="clip")
        row = jnp.where(
            (position < length[:, None]) & (token >= 0), jnp.arange(rows)[:, None], rows
        )
        anywhere = anywhere.at[row, token].set(True, mode="drop")
        row = jnp.where(position >= inputs.num_prompt[:, None], row, rows)
        return anywhere, output.at[row, token].add(1.0, mode="drop")

    start = (jnp.zeros((rows, width), bool), jnp.zeros((rows, width), jnp.float32))
    steps = (length.max() + chunk - 1) // chunk
    anywhere, output = lax.fori_loop(0, steps, count, start)
    repeat = inputs.repetition_penalty[:, None]
    out = jnp.where(anywhere, jnp.where(logits > 0, logits / repeat, logits * repeat), logits)
    out = out - inputs.frequency_penalty[:, None] * output
    out = out - inputs.presence_penalty[:, None] * (output > 0)
    return jnp.where(length[:, None] > 0, out, logits)


def needs_processing(inputs: SamplingInputs) -> Array:
    """[] True when `apply` would change anything."""
    return has_edits(inputs) | has_penalty(inputs).any()


def process(logits: Array, inputs: SamplingInputs, vocab: int) -> Array:
    """[S, V'] -> [S, V']: allow lists, bad words, min_tokens and bias, then penalties."""
    logits = lax.cond(
        has_edits(inputs), lambda x: _apply_edits(x, inputs, vocab), lambda x: x, logits
    )
    result: Array = lax.cond(
        has_penalty(inputs).any(), lambda x: _apply_penalties(x, inputs), lambda x: x, logits
    )
    return result
