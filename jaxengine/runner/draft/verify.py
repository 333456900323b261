"""The two programs of a step with drafts: the model over last token and drafts, then sampling,
acceptance and write-back.

Every position is sampled as it would be without drafts, with its own (seed, position) key, and a
draft is kept while it equals the sampled token. For a drafter without probabilities this is exact
speculative sampling (Leviathan et al. 2023; Chen et al. 2023): the token is drawn from the target
itself. Greedy and seeded ids do not change.

Shape letters in addition to the usual ones: K drafts a row, T = S * (1 + K) tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxengine.models.decoder import KV, decode, head
from jaxengine.models.layers.attention import AttentionPlan
from jaxengine.models.spec import Params
from jaxengine.runner.forward import StepConfig, sections
from jaxengine.runner.sampling_step import sampling_inputs
from jaxengine.runner.state import Counted, SlotState
from jaxengine.sampling.sampler import sample
from jaxengine.sched.batch import COLUMN, BatchShape, Bucket, rows_layout
from jaxengine.sched.verify_batch import ON_DEVICE, verify_layout

NO_DRAFT = -1


class Drafted(NamedTuple):
    """The values that the first program hands to the second."""

    hidden: Float[Array, "T W"]
    drafts: Int[Array, "S K"]  # NO_DRAFT where there is none; nothing follows one
    known: Int[Array, "S"]  # tokens of the row before the step


def verify_forward(
    config: StepConfig,
    bucket: Bucket,
    params: Params,
    kv: KV,
    slots: SlotState,
    length: Int[Array, "R"],
    proposed: Int[Array, "S K"],
    blob: Int[Array, "B"],
) -> tuple[KV, Drafted]:
    """Run rows of 1 + K tokens (`jaxengine.sched.verify_batch`). `kv` is donated.

    `length[slot]` are a slot's tokens, read where the host does not know; `proposed` are the
    drafts of rows that the host leaves to the device.
    """
    part = sections(verify_layout(bucket, config.shape), blob)
    rows, width = bucket.rows, 1 + bucket.drafts
    live_row = jnp.arange(rows) < part["num_rows"][0]
    known = known_tokens(part, length)
    asked = jnp.arange(bucket.drafts) < part["num_drafts"][:, None]
    drafts = jnp.where(part["drafts"] == ON_DEVICE, proposed, part["drafts"])
    drafts = jnp.where(asked, drafts, NO_DRAFT)
    is_draft = jnp.cumprod(drafts >= 0, axis=1) > 0
    drafts = jnp.where(is_draft, drafts, NO_DRAFT)

    last = slots.last_token.at[part["slots"]].get(mode="fill", fill_value=0)
    ids = jnp.concatenate([last[:, None], jnp.maximum(drafts, 0)], axis=1).reshape(-1)
    real = jnp.concatenate([jnp.ones((rows, 1), bool), is_draft], axis=1) & live_row[:, None]
    first = known[:, None] - 1
    position = jnp.where(real, first + jnp.arange(width), first)
    tokens = rows * width
    kv_slot = token_slots(config.shape, part["block_table"], position, real)
    num_tokens = part["num_rows"][0] * width
    plan = AttentionPlan(
        positions=position.reshape(-1),
        kv_slot=kv_slot.reshape(-1, tokens),
        # A row's tokens are queries of their own, each as long as its position says.
        block_table=jnp.repeat(part["block_table"], width, axis=1),
        seq_len=jnp.where(live_row[:, None], position + 1, 0).reshape(-1),
        q_start=jnp.arange(tokens + 1, dtype=jnp.int32),
        num_tokens=num_tokens,
        num_decode=num_tokens,
        items=None,
        num_items=jnp.int32(0),
    )
    layout = replace(config.layout, dbo=bucket.dbo)
    hidden, kv = decode(config.spec, params, kv, ids, plan, layout, taps=config.taps)
    return kv, Drafted(hidden, drafts, known)


def known_tokens(part: dict[str, Array], length: Int[Array, "R"]) -> Int[Array, "S"]:
    """The rows' tokens before the step, counted by the device where the host does not know."""
    counted = length.at[part["slots"]].get(mode="fill", fill_value=1)
    return jnp.where(part["start"] == ON_DEVICE, counted, part["start"] + 1)


def token_slots(
    shape: BatchShape,
    block_table: Int[Array, "G S W"],
    position: Int[Array, "S M"],
    real: Bool[Array, "S M"],
) -> Int[Array, "G S M"]:
    """Slots for the KV of the rows' tokens; out of range, all distinct, for what is not `real`."""
    column = jnp.clip(position // shape.block_size, 0, shape.table_width - 1)
    block = jnp.take_along_axis(block_table, column[None], axis=2)
    nowhere = shape.num_blocks * shape.block_size + jnp.arange(position.size)
    slot = block * shape.block_size + position % shape.block_size
    return jnp.where(real, slot, nowhere.reshape(position.shape))


def accept_rows(
    config: StepConfig,
    bucket: Bucket,
    params: Params,
    slots: SlotState,
    counted: Counted,
    drafted: Drafted,
    blob: Int[Array, "B"],
    mask: Int[Array, "T V32"],
) -> tuple[SlotState, Counted, Int[Array, "S X"]]:
    """Sample all positions and keep each row's tokens up to the first refused draft. `slots` and
    `counted` are donated.

    Output row: drafts verified, then for each of 1 + K places token id (-1: none), bad flag,
    rank, ids and log-probability bits, as `sample_rows` has them.
    """
    rows, width = bucket.rows, 1 + bucket.drafts
    part = sections(rows_layout(rows), blob)
    drafts, known = drafted.drafts, drafted.known
    place = jnp.arange(width)
    count = (drafts >= 0).sum(1)
    # Drafts enter the history behind the known tokens: a place reads those before it only.
    history = _write(slots.history, part["slots"], known, drafts)
    slots = slots._replace(history=history)
    spread = {name: jnp.repeat(part[name], width, axis=0) for name in ("slots", "sampling")}
    seq_len = (known[:, None] + place).reshape(-1)
    record = spread["sampling"]
    outputs = seq_len - record[:, COLUMN["num_prompt"]]
    used = (place <= count[:, None]) & (part["samples"] > 0)[:, None]
    spread["seq_len"] = seq_len
    spread["min_active"] = (outputs < record[:, COLUMN["min_tokens"]]).astype(jnp.int32)
    spread["samples"] = used.reshape(-1).astype(jnp.int32)
    # Fused with its readers, the spreading of the rows took LLVM minutes to compile at some sizes.
    spread = jax.lax.optimization_barrier(spread)
    inputs = sampling_inputs(spread, slots)
    inputs = inputs._replace(grammar=mask, use_grammar=part["use_grammar"][0] > 0)
    logits = head(config.spec, params, config.final(drafted.hidden), config.layout)
    out = sample(logits, inputs, config.num_logprobs)
    chosen = out.token_ids.reshape(rows, width)
    bad = out.bad_rows.reshape(rows, width)
    kept, ended = accepted_tokens(chosen, bad, drafts)
    kept = jnp.where((part["samples"] > 0)[:, None], kept, -1)
    number = (kept >= 0).sum(1)
    at = jnp.where(number > 0, part["slots"], _nowhere(counted.length, rows))
    end = jnp.maximum(number - 1, 0)[:, None]
    last = jnp.take_along_axis(kept, end, 1)[:, 0]
    slots = slots._replace(
        last_token=slots.last_token.at[at].set(last, mode="drop"),
        history=_write(slots.history, part["slots"], known, kept),
    )
    feature = counted.feature
    if feature is not None:
        hidden = config.features(drafted.hidden).reshape(rows, width, -1)
        newest = jnp.take_along_axis(hidden, end[:, :, None], 1)[:, 0]
        feature = feature.at[at].set(newest, mode="drop")
    counted = Counted(counted.length.at[at].set(known + number, mode="drop"), feature)
    flag = jnp.zeros((rows, width), jnp.int32).at[:, 0].set(ended)
    bits = jax.lax.bitcast_convert_type(out.logprobs.astype(jnp.float32), jnp.int32)
    columns = jnp.concatenate(
        [kept.reshape(-1, 1), flag.reshape(-1, 1), out.ranks[:, None], out.logprob_ids, bits],
        axis=1,
    )
    return slots, counted, jnp.concatenate([count[:, None], columns.reshape(rows, -1)], axis=1)


def kept_tokens(rows: Int[Array, "S X"], places: int) -> Int[Array, "S M"]:
    """The tokens that output rows of `accept_rows` kept, -1 behind them."""
    return rows[:, 1:].reshape(rows.shape[0], places, -1)[:, :, 0]


def accepted_tokens(
    chosen: Int[Array, "S M"], bad: Int[Array, "S M"], drafts: Int[Array, "S K"]
) -> tuple[Int[Array, "S M"], Int[Array, "S"]]:
    """The sampled tokens up to and with the first that differs from its draft, -1 behind them; and
    1 for rows whose first position is bad.

    A bad position behind good ones is left to the next step, which starts with it.
    """
    agree = (chosen[:, :-1] == drafts) & (drafts >= 0)
    accepted = jnp.cumprod(agree, axis=1).sum(1)
    kept = jnp.where(jnp.arange(chosen.shape[1]) <= accepted[:, None], chosen, -1)
    return kept, bad[:, 0].astype(jnp.int32)


def _write(
    history: Int[Array, "R H"], slots: Array, first: Array, tokens: Int[Array, "S N"]
) -> Array:
    """Tokens >= 0 into their slots' history, from `first` on."""
    rows, count = tokens.shape
    at = jnp.where(tokens >= 0, slots[:, None], _nowhere(history, rows)[:, None])
    return history.at[at, first[:, None] + jnp.arange(count)].set(tokens, mode="drop")


def _nowhere(by_slot: Array, rows: int) -> Array:
    """Slots that do not exist."""
    return by_slot.shape[0] + jnp.arange(rows)
