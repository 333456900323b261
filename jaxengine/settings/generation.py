"""Sampling defaults: the model's, and `override_generation_config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxengine.sampling_params import SamplingParams
from jaxengine.validation import Limits, RequestError, check_params

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """The model's sampling defaults over the built-in ones; a request's own values beat both.

    Read: temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens. `do_sample` is
    not: a served model samples unless the request says temperature 0.
    """
    given = {k: generation_config[k] for k in _DEFAULTS if generation_config.get(k) is not None}
    if generation_config.get("max_new_tokens") is not None:
        given["max_tokens"] = generation_config["max_new_tokens"]
    return SamplingParams(**given)


def generation_override(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """--override-generation-config as a mapping. Raises ValueError naming it, for a value that no
    request could have too."""
    name = "override_generation_config"
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"{name} is not valid JSON: {error}") from None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be a JSON object")
    known = (*_DEFAULTS, "max_new_tokens")
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{name}: {unknown[0]!r} is none of {', '.join(known)}")
    try:
        check_params(default_params(given), Limits(2**31, 2**31))
    except RequestError as error:
        raise ValueError(f"{name}: {error.message}") from None
    return dict(given)
