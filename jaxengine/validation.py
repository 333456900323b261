"""Checks of request parameters, at the door: every face calls `check_params` before the engine.

A bad value raises `RequestError` (HTTP 400) that names the field. Integral floats (`1e9` in JSON
is a float) are taken as integers; booleans never are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from jaxengine.sampling_params import SamplingParams

MAX_N = 16384
MAX_PROMPTS = 2048  # of one request, as for embeddings
MAX_BAD_WORDS = 1024
MAX_STOP_STRINGS = 1024
MAX_STOP_LENGTH = 1024  # characters; every new text is searched for every stop string
# At 1e-4 and below the logits' own rounding decides, so these are greedy. Larger ones are sampled.
GREEDY_TEMPERATURE = 1e-4
INT64 = (-(2**63), 2**63 - 1)
SEEDS = (-(2**63), 2**64 - 1)
# Beyond these a penalised logit leaves float32.
PENALTY_RANGE = (1e-30, 1e30)


class RequestError(ValueError):
    """A request that cannot be served as asked. `field` is the parameter at fault; `code`, where
    there is one, tells programs what is wrong."""

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.message = message
        self.code = code


TOO_LONG = "context_length_exceeded"  # what clients look for before they shorten a conversation


@dataclass(frozen=True)
class Limits:
    """What requests are checked against.

    `vocab_size` is the width of the logits. It may exceed the tokenizer's size: ids between the
    two are legal everywhere (they have logits; their text is empty), ids from `vocab_size` on
    are refused. `max_logprobs` -1 means the whole vocabulary.
    """

    max_model_len: int
    vocab_size: int
    max_logprobs: int = 20


def check_int(field: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int within [low, high] (None: what 64 bits hold); RequestError otherwise."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(field, f"{field} must be an integer, got {shown(value)}")
    if value < low or value > (INT64[1] if high is None else high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        if high is None and value > low:
            bounds = f"below 2**63, and {bounds}"
        raise RequestError(field, f"{field} must be {bounds}, got {shown(value)}")
    return value


def check_float(field: str, value: object, low: float, high: float) -> float:
    """`value` as a finite float within [low, high]; RequestError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"{field} must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(field, f"{field} must be finite, got {shown(value)}")
    if not low <= number <= high:
        raise RequestError(field, f"{field} must be between {low:g} and {high:g}, got {number:g}")
    return number


def check_text(field: str, value: object) -> str:
    """`value` as a string without lone surrogates (they have no UTF-8 form)."""
    if not isinstance(value, str):
        raise RequestError(field, f"{field} must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(field, f"{field} holds a lone surrogate: not valid Unicode") from None
    return value


def check_token_ids(field: str, value: object, vocab_size: int) -> list[int]:
    """`value` as a list of ids in [0, vocab_size); RequestError names the first bad one."""
    if not isinstance(value, list | tuple):
        raise RequestError(field, f"{field} must be a list of token ids, got {shown(value)}")
    ids = list(value)
    if ids and set(map(type, ids)) != {int}:
        bad = next(i for i in ids if type(i) is not int)
        raise RequestError(field, f"{field} must hold integers only, got {shown(bad)}")
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(
            field,
            f"{field} holds token id {shown(bad)}, outside the vocabulary 0..{vocab_size - 1}",
        )
    return ids


def _check_set(field: str, value: object, vocab_size: int) -> list[int]:
    """Token ids of which each counts once."""
    if isinstance(value, list | tuple) and len(value) > vocab_size:
        raise RequestError(
            field, f"{field} has {len(value)} entries, more than the {vocab_size} tokens there are"
        )
    return list(dict.fromkeys(check_token_ids(field, value, vocab_size)))


def check_priority(value: object) -> int:
    return check_int("priority", value, *INT64)


def check_cache_salt(value: object) -> str | None:
    if value is None:
        return None
    if not check_text("cache_salt", value):
        raise RequestError("cache_salt", "cache_salt must be a non-empty string")
    return str(value)


def check_prompt_ids(value: object, limits: Limits) -> list[int]:
    """Prompt ids in the vocabulary, and 1 to max_model_len - 1 of them."""
    ids = check_token_ids("prompt", value, limits.vocab_size)
    check_prompt_length(len(ids), limits)
    return ids


def check_prompt_length(length: int, limits: Limits, *, at_least: bool = False) -> None:
    """RequestError unless the prompt fits (`at_least`: `length` is a lower bound)."""
    if length == 0:
        raise RequestError("prompt", "prompt is empty: at least 1 token is needed")
    if length >= limits.max_model_len:
        # in the words that clients look for: those of Anthropic's API, then those of OpenAI's
        raise RequestError(
            "prompt",
            f"prompt is too long: {'at least ' if at_least else ''}{length} tokens > "
            f"{limits.max_model_len - 1} maximum (this model's maximum context length is "
            f"{limits.max_model_len} tokens; max_model_len is {limits.max_model_len})",
            TOO_LONG,
        )


def check_params(params: SamplingParams, limits: Limits) -> SamplingParams:
    """The parameters, checked and normalised (see the module and SamplingParams).

    Greedy (temperature <= 1e-4) clears top_p, top_k and min_p. `seed` -1 is None, others are
    taken modulo 2**64. `top_k` -1 or above the vocabulary is 0, `logprobs` -1 is the vocabulary
    size, `logit_bias` is clamped to +-100, `skip_reading_prefix_cache` None becomes
    "prompt_logprobs asked". `max_tokens` None stays: the prompt's length decides it
    (`fit_to_context`).
    """
    return replace(params, **_checked(params, limits))


# What can be said of parameters before the model is known.
_ANY_MODEL = Limits(max_model_len=2**63, vocab_size=2**63, max_logprobs=-1)


def check_values(params: SamplingParams) -> None:
    """RequestError for a value that no model could be asked for. SamplingParams calls it when it is
    made."""
    _checked(params, _ANY_MODEL)


def _checked(params: SamplingParams, limits: Limits) -> dict[str, Any]:
    """The fields that `check_params` changes."""
    vocab = limits.vocab_size
    changes: dict[str, Any] = {
        "n": check_int("n", params.n, 1, MAX_N),
        "presence_penalty": check_float("presence_penalty", params.presence_penalty, -2, 2),
        "frequency_penalty": check_float("frequency_penalty", params.frequency_penalty, -2, 2),
        "repetition_penalty": check_float(
            "repetition_penalty", params.repetition_penalty, *PENALTY_RANGE
        ),
        "min_tokens": check_int("min_tokens", params.min_tokens, 0),
        "seed": None if params.seed is None else check_int("seed", params.seed, *SEEDS),
        "logprobs": _check_logprobs("logprobs", params.logprobs, limits),
        "prompt_logprobs": _check_logprobs("prompt_logprobs", params.prompt_logprobs, limits),
        "stop": _check_strings("stop", params.stop),
        "stop_token_ids": None
        if params.stop_token_ids is None
        else _check_set("stop_token_ids", params.stop_token_ids, vocab),
        "logit_bias": _check_logit_bias(params.logit_bias, vocab),
        "bad_words": _check_strings("bad_words", params.bad_words),
    }
    if changes["seed"] is not None:
        # 64 bits on the device; there a negative seed is its two's complement
        changes["seed"] = None if changes["seed"] == -1 else changes["seed"] % 2**64
    changes |= _check_sampling(params, vocab)
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise RequestError(name, f"{name} must be true or false")
    if params.max_tokens is not None:
        most = check_int("max_tokens", params.max_tokens, 1)
        if changes["min_tokens"] > most:
            raise RequestError(
                "min_tokens", f"min_tokens is {changes['min_tokens']}, above max_tokens {most}"
            )
        changes["max_tokens"] = most
    elif changes["min_tokens"] >= limits.max_model_len:
        raise RequestError(
            "min_tokens",
            f"min_tokens is {changes['min_tokens']}, above what max_model_len "
            f"{limits.max_model_len} allows",
        )
    if changes["stop"] and not params.detokenize:
        raise RequestError("stop", "stop strings need detokenize")
    if len(changes["stop"] or ()) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"stop may hold at most {MAX_STOP_STRINGS} strings")
    longest = max(map(len, changes["stop"] or [""]))
    if longest > MAX_STOP_LENGTH:
        raise RequestError(
            "stop", f"stop holds a string of {longest} characters, above {MAX_STOP_LENGTH}"
        )
    if len(changes["bad_words"] or ()) > MAX_BAD_WORDS:
        raise RequestError("bad_words", f"bad_words may hold at most {MAX_BAD_WORDS} words")
    if params.allowed_token_ids is not None:
        allowed = _check_set("allowed_token_ids", params.allowed_token_ids, vocab)
        if not allowed:
            raise RequestError("allowed_token_ids", "allowed_token_ids must not be empty")
        changes["allowed_token_ids"] = allowed
    if params.thinking_token_budget is not None:
        name, budget = "thinking_token_budget", params.thinking_token_budget
        changes[name] = check_int(name, budget, -1)
        if changes[name] == -1:
            changes[name] = None
        elif params.allowed_token_ids is not None:
            raise RequestError(name, f"{name} cannot be combined with allowed_token_ids")
    if params.truncate_prompt_tokens is not None:
        changes["truncate_prompt_tokens"] = _check_truncation(params.truncate_prompt_tokens, limits)
    if params.stream_interval is not None:
        changes["stream_interval"] = check_int("stream_interval", params.stream_interval, 1)
    if params.truncation_side not in (None, "left", "right"):
        side = shown(params.truncation_side)
        raise RequestError("truncation_side", f"truncation_side must be left or right, got {side}")
    skip_cache = params.skip_reading_prefix_cache
    if skip_cache is None:
        changes["skip_reading_prefix_cache"] = params.prompt_logprobs is not None
    elif not isinstance(skip_cache, bool):
        raise RequestError("skip_reading_prefix_cache", "skip_reading_prefix_cache must be a bool")
    return changes


def fit_to_context(params: SamplingParams, prompt_len: int, limits: Limits) -> SamplingParams:
    """max_tokens within what the prompt leaves of max_model_len (None = all of it)."""
    room = limits.max_model_len - prompt_len
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def _check_sampling(params: SamplingParams, vocab_size: int) -> dict[str, Any]:
    temperature = check_float("temperature", params.temperature, 0, 2)
    top_p = check_float("top_p", params.top_p, 0, 1)
    if top_p == 0:
        raise RequestError("top_p", "top_p must be above 0 and at most 1, got 0")
    top_k = check_int("top_k", params.top_k, -1)
    min_p = check_float("min_p", params.min_p, 0, 1)
    if temperature <= GREEDY_TEMPERATURE:
        if params.n > 1:
            raise RequestError("n", f"n must be 1 when temperature is 0 (greedy), got {params.n}")
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if top_k == -1 or top_k >= vocab_size:
        top_k = 0
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}


def _check_logprobs(field: str, value: int | None, limits: Limits) -> int | None:
    if value is None:
        return None
    count = check_int(field, value, -1)
    whole = limits.max_logprobs == -1
    most = limits.vocab_size if whole else min(limits.max_logprobs, limits.vocab_size)
    if count == -1:
        count = limits.vocab_size
    elif whole:
        count = min(count, limits.vocab_size)
    if count > most:
        raise RequestError(
            field, f"{field} asks for {shown(value)}, above the limit max_logprobs {most}"
        )
    return count


def _check_strings(field: str, value: object) -> list[str] | None:
    if value is None:
        return None
    words: Iterable[object] = [value] if isinstance(value, str) else value  # type: ignore[assignment]
    if not isinstance(words, list | tuple):
        raise RequestError(field, f"{field} must be a string or a list of strings")
    checked = [check_text(field, word) for word in words]
    if "" in checked:
        raise RequestError(field, f"{field} must not hold an empty string")
    return checked


def _check_logit_bias(value: object, vocab_size: int) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias", "logit_bias must map token ids to numbers")
    bias = {}
    for key, amount in value.items():
        token = key
        if isinstance(key, str) and key.removeprefix("-").isdecimal() and len(key) < 20:
            token = int(key)  # JSON has string keys only
        check_token_ids("logit_bias", [token], vocab_size)
        number = check_float("logit_bias", amount, -math.inf, math.inf)
        bias[token] = max(-100.0, min(100.0, number))
    return bias


def _check_truncation(value: object, limits: Limits) -> int:
    """Tokens of the prompt to keep; -1 = as many as fit."""
    keep = check_int("truncate_prompt_tokens", value, -1, limits.max_model_len - 1)
    if keep == 0:
        raise RequestError("truncate_prompt_tokens", "truncate_prompt_tokens must not be 0")
    return limits.max_model_len - 1 if keep == -1 else keep


def shown(value: object) -> str:
    # very long integers raise in repr(); nothing long belongs in one sentence
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
