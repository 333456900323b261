"""Device-side sampling: pure functions over fixed shapes, for use inside the jitted step."""

from jaxengine.sampling.inputs import (
    EDIT_ADD,
    EDIT_ALLOW,
    EDIT_BAN,
    EDIT_MIN_TOKENS,
    EDIT_NONE,
    MIN_LOGPROB,
    SampleOutput,
    SamplingInputs,
    neutral_inputs,
)
from jaxengine.sampling.logprobs import prompt_logprobs
from jaxengine.sampling.sampler import needs_full, sample

__all__ = [
    "EDIT_ADD",
    "EDIT_ALLOW",
    "EDIT_BAN",
    "EDIT_MIN_TOKENS",
    "EDIT_NONE",
    "MIN_LOGPROB",
    "SampleOutput",
    "SamplingInputs",
    "needs_full",
    "neutral_inputs",
    "prompt_logprobs",
    "sample",
]
