"""A whole second model as drafter, with a KV pool of its own under the target's block tables."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxengine.models.decoder import KV, decode, head
from jaxengine.models.layers.attention import AttentionPlan
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.runner.draft.drafter import Drafter, draft_inputs, row_plan
from jaxengine.runner.forward import StepConfig
from jaxengine.runner.state import Counted, SlotState
from jaxengine.sampling.blocks import argmax, block_max, pad_vocab
from jaxengine.sched.batch import Bucket


def model_drafter(
    own: StepConfig,
    params: Params,
    kv: KV,
    load: Callable[[], Params],
    vocab_size: int,
) -> Drafter:
    """`own` is the draft model's step; the shapes of batches in it are the target's. `params` and
    `kv` are shapes; tokens below `vocab_size` are drafted."""
    spec, layout = own.spec, own.layout

    def propose(
        bucket: Bucket, params: Params, kv: KV, slots: SlotState, counted: Counted, blob: Array
    ) -> tuple[KV, Array]:
        part, last, known = draft_inputs(own, bucket, slots, counted, blob)
        live = jnp.arange(bucket.rows) < part["num_rows"][0]

        def run(kv: KV, tokens: Array, i: Array) -> tuple[Array, KV]:
            real = live & (i <= part["num_drafts"])
            plan = row_plan(own, part, (known - 1 + i)[:, None], real[:, None])
            return decode(spec, params, kv, tokens, plan, layout)

        def one(carry: tuple[KV, Array], i: Array) -> tuple[tuple[KV, Array], Array]:
            kv, tokens = carry
            hidden, kv = run(kv, tokens, i)
            tokens = greedy(spec, params, hidden, vocab_size)
            return (kv, tokens), tokens

        (kv, tokens), drafts = jax.lax.scan(one, (kv, last), jnp.arange(bucket.drafts))
        # Once more, for the KV of the last draft, which may be accepted.
        _, kv = run(kv, tokens, jnp.int32(bucket.drafts))
        return kv, drafts.T

    def layers(params: Params, kv: KV, ids: Array, hidden: Array | None, plan: AttentionPlan) -> KV:
        return decode(spec, params, kv, ids, plan, layout)[1]

    return Drafter("draft_model", params, lambda target: load(), propose, kv, layers)


def greedy(
    spec: DecoderSpec, params: Params, hidden: Float[Array, "S D"], vocab_size: int
) -> Array:
    """[S] int32 the likeliest token of each row, of the first `vocab_size`."""
    logits = pad_vocab(head(spec, params, hidden)[:, :vocab_size])
    return argmax(logits, block_max(logits)).astype(jnp.int32)


def check_fits(draft: DecoderSpec, target: DecoderSpec, max_model_len: int, name: str) -> None:
    """Raises ValueError with one sentence when the model cannot draft for the target."""
    what = f"speculative_config.model {name}"
    if draft.max_position < max_model_len:
        raise ValueError(
            f"{what} has {draft.max_position} positions, fewer than max_model_len "
            f"{max_model_len}; speculative_config.max_model_len says up to where it drafts"
        )
    check_windows(draft, target, name)


def check_windows(draft: DecoderSpec, target: DecoderSpec, name: str) -> None:
    """Raises ValueError when the target's block tables do not keep what the drafter attends to."""
    what = f"speculative_config.model {name}"
    # Group 0 keeps every block where some layer of the target has full attention.
    if draft.groups != target.groups and (draft.groups != (0,) or target.groups[0] != 0):
        raise ValueError(
            f"{what} has attention windows {list(draft.groups)} and the target "
            f"{list(target.groups)} (0 = full): its KV cannot lie under the target's block tables"
        )
