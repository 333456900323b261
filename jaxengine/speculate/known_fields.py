"""Fields of `--speculative-config` that vLLM has and jaxengine needs no switch for: each is taken
at the value that says what happens here anyway, and refused at any other. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Name: the values that change nothing, and why no other one works.
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "draft_tensor_parallel_size": ((1,), "a drafter runs on one device"),
    "quantization": ((), "a drafter runs in the model's dtype"),
    "draft_load_config": ((), "a drafter is loaded as the model is"),
    "attention_backend": ((), "the drafter's attention follows the engine's attention_backend"),
    "moe_backend": ((), "there is one implementation of experts"),
    "code_revision": ((), "no code of a checkpoint is run"),
    "speculative_token_tree": ((), "drafts are a chain, not a tree"),
    "enforce_eager": ((False,), "every program is compiled"),
    "parallel_drafting": ((False,), "drafts are made one after the other"),
    "disable_padded_drafter_batch": ((False,), "drafts stay on the device, in padded batches"),
    "disable_eagle_block_drop": ((False, True), "no block of a prefix hit is dropped"),
    "disable_logprobs": ((False,), "log-probabilities are given at every place"),
    "use_heterogeneous_vocab": ((False,), "a drafter must have the model's vocabulary"),
    "enable_adaptive_verification": ((False,), "`adaptive` chooses the number of drafts"),
    "draft_sample_method": (("greedy",), "drafts are the drafter's likeliest tokens"),
    "rejection_sample_method": (("standard", "strict"), "verification keeps the distribution"),
    "synthetic_acceptance_rate": ((), "drafts are accepted for what they are"),
    "synthetic_acceptance_rates": ((), "drafts are accepted for what they are"),
}


def without_fixed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are left to be read. Raises ValueError with a sentence that names a field
    which asks for something else than what there is."""
    left = {}
    for name, value in fields.items():
        if name not in _FIXED:
            left[name] = value
            continue
        allowed, why = _FIXED[name]
        same = any(value == one and type(value) is type(one) for one in allowed)
        if value is not None and not same:
            names = " or ".join(_json(one) for one in (*allowed, None))
            raise ValueError(f"speculative_config.{name} takes {names}, got {value!r}: {why}")
    return left


def _json(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
