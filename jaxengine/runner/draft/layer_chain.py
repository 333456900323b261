"""Drafts from one layer behind the target, run again on its own output: EAGLE, MTP.

At position p the layer takes a state of the target there and the token at p + 1, and guesses the
token at p + 2. Its KV at p needs the token at p + 1, so that it is written once the step was
sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxengine.models.decoder import KV
from jaxengine.models.layers.attention import AttentionPlan
from jaxengine.models.spec import Params
from jaxengine.runner.draft.drafter import Drafter, draft_inputs, features_of, row_plan
from jaxengine.runner.forward import StepConfig
from jaxengine.runner.state import Counted, SlotState
from jaxengine.sched.batch import Bucket

State = Float[Array, "T D"]
Run = Callable[[Params, KV, Int[Array, "T"], State, AttentionPlan], tuple[State, KV]]


@dataclass(frozen=True)
class Layer:
    """`begin(params, features [T, F])` makes of what drafters read of the target what the layer is
    told. `run(params, kv, tokens, state, plan)` gives its output, which it may be told in the next
    turn, and the KV with these positions. `guess(params, output)` are the tokens [T] behind."""

    begin: Callable[[Params, Float[Array, "T F"]], State]
    run: Run
    guess: Callable[[Params, State], Int[Array, "T"]]


def chain_drafter(
    method: str,
    layer: Layer,
    step: StepConfig,
    params: Params,
    kv: KV,
    load: Callable[[Params], Params],
) -> Drafter:
    """`step` is the layer's own; `params` and `kv` are shapes; `load` gets the target's
    parameters."""

    def propose(
        bucket: Bucket, params: Params, kv: KV, slots: SlotState, counted: Counted, blob: Array
    ) -> tuple[KV, Array]:
        part, last, known = draft_inputs(step, bucket, slots, counted, blob)
        live = jnp.arange(bucket.rows) < part["num_rows"][0]

        def one(carry: tuple[KV, Array, Array], i: Array) -> tuple[Any, Array]:
            kv, tokens, state = carry
            # A prompt of one token has no position behind which there is a token yet.
            position = known - 2 + i
            real = live & (i < part["num_drafts"]) & (position >= 0)
            plan = row_plan(step, part, position[:, None], real[:, None])
            state, kv = layer.run(params, kv, tokens, state, plan)
            tokens = layer.guess(params, state)
            return (kv, tokens, state), tokens

        begin = (kv, last, layer.begin(params, features_of(counted, part)))
        (kv, _, _), drafts = jax.lax.scan(one, begin, jnp.arange(bucket.drafts))
        return kv, drafts.T

    def layers(params: Params, kv: KV, ids: Array, hidden: Array | None, plan: AttentionPlan) -> KV:
        assert hidden is not None
        return layer.run(params, kv, ids, layer.begin(params, hidden), plan)[1]

    return Drafter(
        method, params, load, propose, kv, layers,
        reads_hidden=True, remembers=True,
    )  # fmt: skip
