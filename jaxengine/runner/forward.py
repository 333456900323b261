"""The first half of a step: the model over the packed tokens, up to the rows' hidden states.

A step is two programs dispatched back to back, `forward` and `sample`. Nothing of the host comes
between them; they are apart because a sampler per token bucket would double what has to be
compiled, because a prefill of one prompt then pays for one row of the head instead of all, and
because a grammar's mask can be worked out while the forward runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxengine.models.decoder import KV, WHOLE, decode
from jaxengine.models.layers.attention import AttentionPlan
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.parallel.layout import Stage, StepLayout
from jaxengine.sched.batch import HEADER, BatchShape, Bucket, Layout, layout_of


@dataclass(frozen=True)
class StepConfig:
    """What the programs are specialised on, in addition to their buckets."""

    spec: DecoderSpec
    shape: BatchShape
    num_logprobs: int  # K
    row_buckets: tuple[int, ...]  # sizes of the sample programs, ascending
    layout: StepLayout = StepLayout()
    taps: tuple[int, ...] = ()  # see `models.decoder.decode`

    @property
    def width(self) -> int:
        """W, of the hidden states that `forward` gives: final ones, and those of the taps."""
        return self.spec.hidden_size * (1 + len(self.taps))

    @property
    def feature_width(self) -> int:
        """F, the width of what drafters read: the taps' states, without taps the final ones."""
        return self.spec.hidden_size * (len(self.taps) or 1)

    def final(self, hidden: Float[Array, "T W"]) -> Float[Array, "T D"]:
        """The final hidden states, which the output head reads."""
        return hidden[:, : self.spec.hidden_size] if self.taps else hidden

    def features(self, hidden: Float[Array, "T W"]) -> Float[Array, "T F"]:
        """The hidden states that drafters read."""
        return hidden[:, self.spec.hidden_size :] if self.taps else hidden


class ForwardOutput(NamedTuple):
    """`rows[b]` are the first b rows' hidden states, for every size b a sampler may have (the
    caller takes the one it needs); `hidden` are all tokens' (mixed programs only)."""

    rows: dict[int, Float[Array, "b D"]]
    hidden: Float[Array, "T D"] | None


def forward(
    config: StepConfig,
    bucket: Bucket,
    params: Params,
    kv: KV,
    last_token: Int[Array, "R"] | Float[Array, "T D"],
    blob: Int[Array, "B"],
    stage: Stage = WHOLE,
) -> tuple[KV, ForwardOutput | Float[Array, "T D"]]:
    """Run one packed batch (`jaxengine.sched.batch`). `kv` is donated.

    With pipeline stages: all but the first take hidden states in the place of `last_token`, and
    all but the last give hidden states only.
    """
    part = sections(layout_of(bucket, config.shape), blob)
    header = dict(zip(HEADER, part["header"], strict=True))
    rows = part["slots"].shape[0]
    if stage.is_first:
        # Decode rows are the first tokens; their input is the last token of their slot.
        last = last_token.at[part["slots"]].get(mode="fill", fill_value=0)
        ids = part["token_ids"]
        known = ids[:rows]
        inputs = ids.at[:rows].set(jnp.where(jnp.arange(rows) < header["num_decode"], last, known))
    else:
        inputs = last_token
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
    layout = replace(config.layout, dbo=bucket.dbo)
    hidden, kv = decode(config.spec, params, kv, inputs, plan, layout, stage, config.taps)
    if not stage.is_last:
        return kv, hidden
    picked = hidden[part["logits_index"]]
    sizes = (rows,) if bucket.decode_only else config.row_buckets
    out = {size: picked[:size] for size in sizes}
    return kv, ForwardOutput(out, None if bucket.decode_only else hidden)


def num_decode(bucket: Bucket, header: dict[str, Array]) -> Array:
    """Rows that attend as decode rows do: where every row has one token, a prompt's do too."""
    return header["num_rows" if bucket.decode_only else "num_decode"]


def sections(layout: Layout, blob: Int[Array, "B"]) -> dict[str, Array]:
    """The blob's sections, as static slices."""
    found = {}
    for name, one in layout.sections.items():
        size = int(np.prod(one.dims)) // one.num_parts
        starts = [one.offset + i * one.stride for i in range(one.num_parts)]
        parts = [blob[start : start + size] for start in starts]
        # Of several groups' parts each layer takes one, which XLA finds where it lies.
        found[name] = (parts[0] if len(parts) == 1 else jnp.stack(parts)).reshape(one.dims)
    return found
