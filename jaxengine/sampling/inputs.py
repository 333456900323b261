"""What the sampler reads and returns: arrays by row, all shapes static.

Shape letters: S rows, V vocabulary, E edits, B multi-token bad words, W prefix width,
N history slots, H history width, K log-probabilities a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32

GREEDY_BELOW = 1e-5  # temperatures under this mean argmax; the scheduler has the same
MIN_LOGPROB = -9999.0  # stands for -inf, so that results are always finite (JSON has no -inf)

EDIT_NONE = 0  # padding
EDIT_ADD = 1  # logit_bias: add `edit_value`
EDIT_BAN = 2  # the token is illegal
EDIT_ALLOW = 3  # the token is legal in an `allow_row` row; all tokens not named are illegal
EDIT_MIN_TOKENS = 4  # banned while `min_tokens_active`, unless that leaves the row no token


class SamplingInputs(NamedTuple):
    """Per-row sampling state of one step.

    A padding edit or bad word has kind 0 and a row >= S (positive and out of range); one whose
    row or token is out of range is ignored. `history[slot[s], :num_tokens[s]]` holds the row's
    prompt and output tokens; it is read only when a row has a penalty or a multi-token bad word.
    `bad_prefix` rows are left-aligned and padded with -1.
    """

    temperature: Float32[Array, " S"]
    top_k: Int32[Array, " S"]  # 0 or negative = off
    top_p: Float32[Array, " S"]  # 1 = off
    min_p: Float32[Array, " S"]  # 0 = off
    seed_lo: Int32[Array, " S"]  # low and high half of the 64-bit seed
    seed_hi: Int32[Array, " S"]
    position: Int32[Array, " S"]  # of the token being sampled
    repetition_penalty: Float32[Array, " S"]
    frequency_penalty: Float32[Array, " S"]
    presence_penalty: Float32[Array, " S"]
    num_prompt: Int32[Array, " S"]  # history tokens that are prompt
    num_tokens: Int32[Array, " S"]  # history tokens in all
    slot: Int32[Array, " S"]  # the row's row of `history`
    min_tokens_active: Bool[Array, " S"]
    want_logprobs: Bool[Array, " S"]
    allow_row: Bool[Array, " S"]
    valid: Bool[Array, " S"]  # False = padding, or a row that samples nothing in this step
    history: Int32[Array, "N H"]
    edit_row: Int32[Array, " E"]
    edit_token: Int32[Array, " E"]
    edit_kind: Int32[Array, " E"]
    edit_value: Float32[Array, " E"]
    bad_row: Int32[Array, " B"]
    bad_prefix: Int32[Array, "B W"]
    bad_last: Int32[Array, " B"]
    # `allow_mask[slot[s]]` says what an `allow_row` row may sample, instead of EDIT_ALLOW edits
    allow_mask: Int32[Array, "N M"] | None = None
    grammar: Int32[Array, "S M"] | None = None  # M = ceil(V / 32); bit 1 = legal; -1 = all legal
    use_grammar: Bool[Array, ""] | None = None  # False: no row has one (None: look at all masks)


class SampleOutput(NamedTuple):
    """`token_ids` is -1 where the row is not valid or is bad.

    A bad row had NaN or +inf logits, or no legal token. The log-probabilities are of the raw
    logits (after the grammar mask), the sampled token first, then the K best; rows that did not
    ask, and bad rows, hold zeros.
    """

    token_ids: Int32[Array, " S"]
    bad_rows: Bool[Array, " S"]
    logprob_ids: Int32[Array, "S 1+K"]
    logprobs: Float32[Array, "S 1+K"]
    ranks: Int32[Array, " S"]


def neutral_inputs(
    num_rows: int,
    *,
    num_edits: int = 1,
    num_bad_words: int = 1,
    prefix_width: int = 1,
    history: Int32[Array, "N H"] | None = None,
) -> SamplingInputs:
    """NumPy inputs for `num_rows` greedy rows with every feature off (all valid)."""
    s = num_rows

    def ints(fill: int, *shape: int) -> Array:
        return np.full(shape, fill, np.int32)  # type: ignore[return-value]

    def floats(fill: float, *shape: int) -> Array:
        return np.full(shape, fill, np.float32)  # type: ignore[return-value]

    def flags(fill: bool) -> Array:
        return np.full(s, fill)  # type: ignore[return-value]

    return SamplingInputs(
        temperature=floats(0.0, s),
        top_k=ints(0, s),
        top_p=floats(1.0, s),
        min_p=floats(0.0, s),
        seed_lo=ints(0, s),
        seed_hi=ints(0, s),
        position=ints(0, s),
        repetition_penalty=floats(1.0, s),
        frequency_penalty=floats(0.0, s),
        presence_penalty=floats(0.0, s),
        num_prompt=ints(0, s),
        num_tokens=ints(0, s),
        slot=ints(0, s),
        min_tokens_active=flags(False),
        want_logprobs=flags(False),
        allow_row=flags(False),
        valid=flags(True),
        history=ints(0, 1, 1) if history is None else history,
        edit_row=ints(s, num_edits),
        edit_token=ints(0, num_edits),
        edit_kind=ints(EDIT_NONE, num_edits),
        edit_value=floats(0.0, num_edits),
        bad_row=ints(s, num_bad_words),
        bad_prefix=ints(-1, num_bad_words, prefix_width),
        bad_last=ints(0, num_bad_words),
    )


def is_greedy(inputs: SamplingInputs) -> jax.Array:
    """[S] rows that take the argmax."""
    return inputs.temperature < GREEDY_BELOW


def has_penalty(inputs: SamplingInputs) -> jax.Array:
    """[S] rows with a repetition, frequency or presence penalty."""
    on = (inputs.repetition_penalty != 1.0) | (inputs.frequency_penalty != 0.0)
    return (on | (inputs.presence_penalty != 0.0)) & inputs.valid


def has_edits(inputs: SamplingInputs) -> jax.Array:
    """[] any allow list, ban, bias or bad word in the step."""
    rows = inputs.valid.shape[0]
    edits = (inputs.edit_kind != EDIT_NONE).any() | (inputs.bad_row < rows).any()
    return edits | inputs.allow_row.any()
