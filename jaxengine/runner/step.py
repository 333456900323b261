"""The one jitted step: blob in, tokens out. Tokens never leave the device on their way to the
next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxengine.models.decoder import AttentionPlan, decode, head
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.runner.state import DeviceState, SlotState
from jaxengine.sampling.inputs import EDIT_NONE, SamplingInputs
from jaxengine.sampling.logprobs import prompt_logprobs
from jaxengine.sampling.sampler import sample
from jaxengine.sched.batch import (
    COLUMN,
    HAS_ALLOW,
    HAS_BAD_WORDS,
    HAS_EDITS,
    HEADER,
    SAMPLING_FLOATS,
    BatchShape,
    Bucket,
    layout_of,
)

FIXED = 3  # token, bad row, rank: columns of an output row before ids and log-probabilities


class StepOutput(NamedTuple):
    """`rows` goes to the host every step; `prompt` only when a row asked.

    rows [S, 3 + 2 * (1 + K)]: token id (-1: none), bad flag, rank, K+1 ids, K+1 log-probability
    bits. prompt [T, 1 + 2 * (1 + K)]: rank, ids, log-probability bits (None in decode programs).
    """

    rows: Int[Array, "S X"]
    prompt: Int[Array, "T X"] | None


@dataclass(frozen=True)
class StepConfig:
    """What a step program is specialised on, beside its bucket."""

    spec: DecoderSpec
    shape: BatchShape
    num_logprobs: int  # K


def step(
    config: StepConfig,
    bucket: Bucket,
    params: Params,
    state: DeviceState,
    blob: Int[Array, "B"],
) -> tuple[DeviceState, StepOutput]:
    """Run one packed batch: model, sampling, write-back. `state` is donated."""
    spec = config.spec
    part = _sections(bucket, config.shape, blob)
    header = dict(zip(HEADER, part["header"], strict=True))
    token_ids = _resolve_tokens(part, header["num_decode"], state.slots)
    plan = AttentionPlan(
        positions=part["positions"],
        kv_slot=part["kv_slot"],
        block_table=part["block_table"],
        seq_len=part["seq_len"],
        num_decode=header["num_decode"],
        items=part.get("items"),
        num_items=header["num_items"],
    )
    hidden, kv = decode(spec, params, state.kv, token_ids, plan)
    logits = head(spec, params, hidden[part["logits_index"]])
    out = sample(logits, sampling_inputs(part, state.slots), config.num_logprobs)
    slots = _write_back(state.slots, part, out.token_ids)
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
    prompt = None
    if not bucket.decode_only:
        prompt = _prompt_output(config, params, hidden, part["targets"], header)
    return DeviceState(kv, slots), StepOutput(rows, prompt)


def _sections(bucket: Bucket, shape: BatchShape, blob: Int[Array, "B"]) -> dict[str, Array]:
    parts = {}
    for name, (offset, dims) in layout_of(bucket, shape).sections.items():
        parts[name] = blob[offset : offset + int(np.prod(dims))].reshape(dims)
    return parts


def _resolve_tokens(part: dict[str, Array], num_decode: Array, slots: SlotState) -> Int[Array, "T"]:
    """Decode rows are the first tokens; their input is the last token of their slot."""
    rows = part["slots"].shape[0]
    last = slots.last_token.at[part["slots"]].get(mode="fill", fill_value=0)
    ids = part["token_ids"]
    resolved = jnp.where(jnp.arange(rows) < num_decode, last, ids[:rows])
    return ids.at[:rows].set(resolved)


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
    flags = column["flags"]
    samples = part["samples"] > 0

    def of_slot(field: Array, fill: int) -> Array:
        return field.at[part["slots"]].get(mode="fill", fill_value=fill)

    def flagged(bit: int) -> Array:
        return ((flags & bit) != 0) & samples

    kinds = jnp.where(flagged(HAS_EDITS)[:, None], of_slot(slots.edit_kind, EDIT_NONE), EDIT_NONE)
    bad_last = of_slot(slots.bad_last, -1)
    num_words = bad_last.shape[1]
    live_word = flagged(HAS_BAD_WORDS)[:, None] & (bad_last >= 0)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
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
        edit_value=jax.lax.bitcast_convert_type(of_slot(slots.edit_value, 0), jnp.float32).reshape(
            -1
        ),
        bad_row=jnp.where(live_word, row, rows).reshape(-1),
        bad_prefix=of_slot(slots.bad_prefix, -1).reshape(rows * num_words, -1),
        bad_last=bad_last.reshape(-1),
    )


def _write_back(slots: SlotState, part: dict[str, Array], token_ids: Int[Array, "S"]) -> SlotState:
    """The sampled token becomes the slot's last token and the next entry of its history."""
    out_of_range = slots.last_token.shape[0] + jnp.arange(token_ids.shape[0])
    at = jnp.where(part["samples"] > 0, part["slots"], out_of_range)
    token_ids = jnp.maximum(token_ids, 0)
    return slots._replace(
        last_token=slots.last_token.at[at].set(token_ids, mode="drop"),
        history=slots.history.at[at, part["seq_len"]].set(token_ids, mode="drop"),
    )


def _prompt_output(
    config: StepConfig, params: Params, hidden: Array, targets: Array, header: dict[str, Array]
) -> Int[Array, "T X"]:
    tokens, count = targets.shape[0], min(config.num_logprobs, config.spec.vocab_size)

    def compute() -> Array:
        ids, values, ranks = prompt_logprobs(
            hidden, targets, lambda h: head(config.spec, params, h), count
        )
        return jnp.concatenate([ranks[:, None], ids, _bits(values)], axis=1)

    def nothing() -> Array:
        return jnp.zeros((tokens, 1 + 2 * (1 + count)), jnp.int32)

    return jax.lax.cond(header["want_prompt_logprobs"] > 0, compute, nothing)


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
