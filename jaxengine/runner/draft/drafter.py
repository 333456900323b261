"""A drafter with a model of its own on the device, as data and pure functions.

`draft` runs before every step with drafts and gives them. What the drafter must know of a row is
on the device: `remember` keeps the target's hidden state at the position before the last token,
and `follow` runs the drafter over the tokens of every step without drafts (`follow_drafts`: with
drafts), so that its KV holds them too. That KV lies in blocks of the target's numbers, and so
lives and moves with the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.models.decoder import KV
from jaxengine.models.layers.attention import AttentionPlan
from jaxengine.models.spec import Params
from jaxengine.runner.draft.verify import Drafted, kept_tokens, known_tokens, token_slots
from jaxengine.runner.forward import StepConfig, num_decode, sections
from jaxengine.runner.state import Counted, SlotState
from jaxengine.sched.batch import HEADER, Bucket, layout_of, rows_layout
from jaxengine.sched.verify_batch import verify_layout

DraftFn = Callable[[Bucket, Any, KV, SlotState, Counted, Array], tuple[KV, Array]]
LayersFn = Callable[[Any, KV, Array, "Array | None", AttentionPlan], KV]


@dataclass(frozen=True)
class Drafter:
    """`params` and `kv` are shapes; `load` makes the parameters, from the target's.

    `draft(bucket, params, kv, slots, counted, blob)` gives (kv, drafts [S, K]). `layers(params,
    kv, token ids [T], hidden [T, D], plan)` writes the drafter's KV of these tokens; None: it
    keeps none. It runs over the tokens of a step, or with `reads_hidden` over the tokens behind
    them and what drafters read of the target (`StepConfig.features`). `remembers`: `draft` reads
    `Counted.feature`.
    """

    method: str
    params: Any
    load: Callable[[Params], Any]
    draft: DraftFn
    kv: KV = ()
    layers: LayersFn | None = None
    reads_hidden: bool = False
    remembers: bool = False


def follow(
    config: StepConfig,
    bucket: Bucket,
    drafter: Drafter,
    params: Any,
    kv: KV,
    history: Int[Array, "R H"],
    hidden: Float[Array, "T D"] | None,
    blob: Int[Array, "B"],
) -> KV:
    """Write the drafter's KV of a step that had no drafts, once it is sampled. `kv` is donated."""
    assert drafter.layers is not None
    part = sections(layout_of(bucket, config.shape), blob)
    header = dict(zip(HEADER, part["header"], strict=True))
    plan = AttentionPlan(
        positions=part["positions"],
        kv_slot=part["kv_slot"],
        block_table=part["block_table"],
        seq_len=part["seq_len"],
        q_start=part["q_start"],
        num_tokens=header["num_tokens"],
        num_decode=num_decode(bucket, header),
        items=part.get("items"),
        num_items=header["num_items"],
    )
    token = jnp.arange(bucket.tokens)
    row = jnp.searchsorted(part["q_start"][:-1], token, side="right") - 1
    # Rows without tokens start where the last one ends: never found for a real token.
    at = part["positions"] + (1 if drafter.reads_hidden else 0)
    ids = history.at[part["slots"][row], at].get(mode="fill", fill_value=0)
    given = None if hidden is None else config.features(hidden)
    return drafter.layers(params, kv, ids, given, plan)


def follow_drafts(
    config: StepConfig,
    bucket: Bucket,
    drafter: Drafter,
    params: Any,
    kv: KV,
    drafted: Drafted,
    rows: Int[Array, "S X"],
    blob: Int[Array, "B"],
) -> KV:
    """Write the drafter's KV of what a step with drafts kept, from the target's hidden
    states in the place of its own guesses. `rows` is the step's output; `kv` is donated."""
    assert drafter.layers is not None
    width = 1 + bucket.drafts
    part = sections(verify_layout(bucket, config.shape), blob)
    kept = kept_tokens(rows, width)
    live = jnp.arange(bucket.rows) < part["num_rows"][0]
    position = drafted.known[:, None] - 1 + jnp.arange(width)
    plan = row_plan(config, part, position, (kept >= 0) & live[:, None])
    ids = jnp.maximum(kept, 0).reshape(-1)
    return drafter.layers(params, kv, ids, config.features(drafted.hidden), plan)


def remember(
    num_rows: int,
    feature: Float[Array, "R D"],
    hidden: Float[Array, "S D"],
    blob: Int[Array, "B"],
) -> Float[Array, "R D"]:
    """Keep the hidden states that a step without drafts sampled from. `feature` is
    donated."""
    part = sections(rows_layout(num_rows), blob)
    nowhere = feature.shape[0] + jnp.arange(num_rows)
    at = jnp.where(part["samples"] > 0, part["slots"], nowhere)
    return feature.at[at].set(hidden, mode="drop")


def draft_inputs(
    config: StepConfig, bucket: Bucket, slots: SlotState, counted: Counted, blob: Int[Array, "B"]
) -> tuple[dict[str, Array], Int[Array, "S"], Int[Array, "S"]]:
    """The inputs of a step with drafts: the blob's sections, their last tokens, and how many
    tokens each has."""
    part = sections(verify_layout(bucket, config.shape), blob)
    last = slots.last_token.at[part["slots"]].get(mode="fill", fill_value=0)
    return part, last, known_tokens(part, counted.length)


def features_of(counted: Counted, part: dict[str, Array]) -> Float[Array, "S D"]:
    """The rows' remembered hidden states."""
    assert counted.feature is not None
    return counted.feature.at[part["slots"]].get(mode="fill", fill_value=0)


def row_plan(
    config: StepConfig, part: dict[str, Array], position: Int[Array, "S M"], real: Array
) -> AttentionPlan:
    """The plan of M consecutive tokens of every row, each a query of its own; what is not `real`
    writes nothing."""
    rows, width = position.shape
    tokens = rows * width
    position = jnp.maximum(position, 0)
    num_tokens = part["num_rows"][0] * width
    return AttentionPlan(
        positions=position.reshape(-1),
        kv_slot=token_slots(config.shape, part["block_table"], position, real).reshape(-1, tokens),
        block_table=jnp.repeat(part["block_table"], width, axis=1),
        seq_len=jnp.where(real, position + 1, 0).reshape(-1),
        q_start=jnp.arange(tokens + 1, dtype=jnp.int32),
        num_tokens=num_tokens,
        num_decode=num_tokens,
        items=None,
        num_items=jnp.int32(0),
    )
