"""The second half of a step: logits of the rows, sampling, and write-back of the new tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.models.decoder import head
from jaxengine.models.spec import Params
from jaxengine.runner.forward import StepConfig, sections
from jaxengine.runner.state import SlotState
from jaxengine.sampling.inputs import EDIT_NONE, SamplingInputs
from jaxengine.sampling.logprobs import prompt_logprobs
from jaxengine.sampling.sampler import sample
from jaxengine.sched.batch import (
    COLUMN,
    HAS_ALLOW,
    HAS_BAD_WORDS,
    HAS_EDITS,
    SAMPLING_FLOATS,
    rows_layout,
)

FIXED = 3  # token, bad flag, rank: columns of an output row before ids and log-probabilities


def sample_rows(
    config: StepConfig,
    num_rows: int,
    params: Params,
    slots: SlotState,
    hidden: Float[Array, "S D"],
    blob: Int[Array, "B"],
    mask: Int[Array, "S V32"],
    greedy_only: bool = False,
) -> tuple[SlotState, Int[Array, "S X"]]:
    """Sample the packed rows. `slots` is donated; `mask` has a bit for every legal token, and is
    read only when the blob says that some row has a grammar. `greedy_only`: see `sample`.

    Output row: token id (-1: none), bad flag, rank, K+1 ids, K+1 log-probability bits.
    """
    part = sections(rows_layout(num_rows), blob)
    logits = head(config.spec, params, config.final(hidden), config.layout)
    inputs = sampling_inputs(part, slots)
    inputs = inputs._replace(grammar=mask, use_grammar=part["use_grammar"][0] > 0)
    out = sample(logits, inputs, config.num_logprobs, greedy_only=greedy_only)
    rows = jnp.concatenate(
        [
            out.token_ids[:, None],
            out.bad_rows.astype(jnp.int32)[:, None],
            out.ranks[:, None],
            out.logprob_ids,
            _bits(out.logprobs),
        ],
        axis=1,
    )
    return _write_back(slots, part, out.token_ids), rows


def score_prompt(
    config: StepConfig, params: Params, hidden: Float[Array, "T D"], targets: Int[Array, "T"]
) -> Int[Array, "T X"]:
    """Log-probabilities of the next prompt tokens: rank, K+1 ids, K+1 log-probability bits."""
    ids, values, ranks = prompt_logprobs(
        config.final(hidden),
        targets,
        lambda h: head(config.spec, params, h, config.layout),
        config.num_logprobs,
    )
    return jnp.concatenate([ranks[:, None], ids, _bits(values)], axis=1)


def pool_rows(
    hidden: Float[Array, "T D"], index: Int[Array, "T"], num_rows: int
) -> Float[Array, "S D"]:
    """Sums of hidden states by row; `index[t]` is the row that token t belongs to, a number
    out of range means none."""
    return jax.ops.segment_sum(hidden.astype(jnp.float32), index, num_rows)


def sampling_inputs(part: dict[str, Array], slots: SlotState) -> SamplingInputs:
    """The sampler's view of the rows; per-slot lists are gathered and flattened over rows."""
    record = part["sampling"]
    column = {
        name: jax.lax.bitcast_convert_type(record[:, i], jnp.float32)
        if name in SAMPLING_FLOATS
        else record[:, i]
        for name, i in COLUMN.items()
    }
    rows = record.shape[0]
    samples = part["samples"] > 0

    def of_slot(field: Array, fill: int) -> Array:
        return field.at[part["slots"]].get(mode="fill", fill_value=fill)

    def flagged(bit: int) -> Array:
        return ((column["flags"] & bit) != 0) & samples

    kinds = jnp.where(flagged(HAS_EDITS)[:, None], of_slot(slots.edit_kind, EDIT_NONE), EDIT_NONE)
    bad_last = of_slot(slots.bad_last, -1)
    bad_prefix = of_slot(slots.bad_prefix, -1)
    live_word = flagged(HAS_BAD_WORDS)[:, None] & (bad_last >= 0)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    values = jax.lax.bitcast_convert_type(of_slot(slots.edit_value, 0), jnp.float32)
    return SamplingInputs(
        temperature=column["temperature"],
        top_k=column["top_k"],
        top_p=column["top_p"],
        min_p=column["min_p"],
        seed_lo=column["seed_lo"],
        seed_hi=column["seed_hi"],
        position=part["seq_len"],
        repetition_penalty=column["repetition_penalty"],
        frequency_penalty=column["frequency_penalty"],
        presence_penalty=column["presence_penalty"],
        num_prompt=column["num_prompt"],
        num_tokens=part["seq_len"],
        slot=part["slots"],
        min_tokens_active=part["min_active"] > 0,
        want_logprobs=(column["num_logprobs"] >= 0) & samples,
        allow_row=flagged(HAS_ALLOW),
        valid=samples,
        history=slots.history,
        edit_row=jnp.where(kinds == EDIT_NONE, rows, row).reshape(-1),
        edit_token=of_slot(slots.edit_token, 0).reshape(-1),
        edit_kind=kinds.reshape(-1),
        edit_value=values.reshape(-1),
        bad_row=jnp.where(live_word, row, rows).reshape(-1),
        bad_prefix=bad_prefix.reshape(-1, bad_prefix.shape[-1]),
        bad_last=bad_last.reshape(-1),
        allow_mask=slots.allow_mask,
    )


def _write_back(slots: SlotState, part: dict[str, Array], token_ids: Int[Array, "S"]) -> SlotState:
    """The sampled token becomes the slot's last token and the next entry of its history."""
    out_of_range = slots.last_token.shape[0] + jnp.arange(token_ids.shape[0])
    at = jnp.where(token_ids >= 0, part["slots"], out_of_range)
    return slots._replace(
        last_token=slots.last_token.at[at].set(token_ids, mode="drop"),
        history=slots.history.at[at, part["seq_len"]].set(token_ids, mode="drop"),
    )


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
