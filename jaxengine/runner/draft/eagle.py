"""The drafter of `jaxengine train-draft`: a recurrent head on the target's hidden states."""

from __future__ import annotations

from pathlib import Path

import jax
from jaxtyping import Array

from jaxengine.models.decoder import KV
from jaxengine.models.errors import ModelLoadError
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.runner.draft import draft_store
from jaxengine.runner.draft.draft_head import ARCHITECTURE, DraftParams, attach, draft_greedy
from jaxengine.runner.draft.draft_store import Draft
from jaxengine.runner.draft.drafter import Drafter, draft_inputs, features_of
from jaxengine.runner.forward import StepConfig
from jaxengine.runner.state import Counted, SlotState
from jaxengine.sched.batch import Bucket
from jaxengine.weights.resolve import read_json


def is_recurrent(model: str) -> bool:
    """True for a folder of `train-draft`'s own form, or a path to nothing."""
    path = Path(model) / draft_store.CONFIG
    if not path.is_file():
        return Path(model).is_absolute() or model.startswith((".", "~"))  # else a hub id
    try:
        return read_json(path).get("architecture") == ARCHITECTURE
    except ModelLoadError:
        return True  # says what is wrong with it


def read_head(folder: str, spec: DecoderSpec, fingerprint: str) -> Draft:
    """The drafter of a folder, which must have been trained for this model. Raises ValueError."""
    try:
        draft = draft_store.load(folder)
        draft_store.check(draft, spec, fingerprint)
    except ValueError as error:
        raise ValueError(f"speculative_config.model {folder}: {error}") from error
    return draft


def eagle_drafter(draft: Draft, step: StepConfig, target: Params) -> Drafter:
    """`target` are shapes of the target's parameters: embedding and output head are shared."""

    def load(params: Params) -> DraftParams:
        return attach(draft.params, draft.vocab_ids, params)

    def propose(
        bucket: Bucket, params: DraftParams, kv: KV, slots: SlotState, counted: Counted, blob: Array
    ) -> tuple[KV, Array]:
        part, last, _ = draft_inputs(step, bucket, slots, counted, blob)
        feature = features_of(counted, part)
        return kv, draft_greedy(draft.config, params, feature, last, bucket.drafts)

    shapes = jax.eval_shape(load, target)
    return Drafter("eagle", shapes, load, propose, remembers=True)
