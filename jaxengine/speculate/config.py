"""`--speculative-config`: which drafter, and how many drafts at which batch size. No JAX."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

METHODS = ("ngram", "suffix", "eagle", "draft_model", "mtp")
WITH_MODEL = ("eagle", "draft_model", "mtp")  # drafted by a model on the device
WITH_FOLDER = ("eagle", "draft_model")  # ... that `model` names
MAX_DRAFTS = 128
DEFAULT_LOOKUP = 5  # tokens, when neither lookup length is given

Range = tuple[int, int, int]  # first and last batch size, K

_FIELDS = (
    "method",
    "model",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "adaptive",
)


@dataclass(frozen=True)
class SpeculativeConfig:
    """`num_speculative_tokens` is the largest K; `ranges` are sorted and touch, or are empty."""

    method: str
    num_speculative_tokens: int
    ranges: tuple[Range, ...] = ()
    prompt_lookup_min: int = DEFAULT_LOOKUP
    prompt_lookup_max: int = DEFAULT_LOOKUP
    adaptive: bool = False
    model: str = ""  # folder, file or name of the drafter

    @property
    def has_model(self) -> bool:
        """Drafts come from a model on the device."""
        return self.method in WITH_MODEL


def parse_speculative_config(setting: str | dict[str, Any]) -> SpeculativeConfig:
    """From the JSON text of the flag, or the object itself. Raises ValueError naming the field."""
    fields = _fields_of(setting)
    for name in fields:
        if name not in _FIELDS:
            raise ValueError(
                f"speculative_config has no field {name!r}; it has {', '.join(_FIELDS)}"
            )
    method = fields.get("method")
    if method not in METHODS:
        raise ValueError(
            f"speculative_config.method must be one of {', '.join(METHODS)}, got {method!r}"
        )
    adaptive = fields.get("adaptive", False)
    if not isinstance(adaptive, bool):
        raise ValueError(f"speculative_config.adaptive must be true or false, got {adaptive!r}")
    model = _model(method, fields.get("model"))
    lowest, highest = _lookup(fields)
    table = fields.get("num_speculative_tokens_per_batch_size")
    ranges = () if table is None else _ranges(table)
    static = fields.get("num_speculative_tokens")
    most = max((k for _, _, k in ranges), default=0)
    if static is None and method == "mtp" and not ranges:
        static = 1  # what the layer was trained for
    elif static is None:
        if not ranges:
            raise ValueError(
                "speculative_config needs num_speculative_tokens or "
                "num_speculative_tokens_per_batch_size"
            )
        static = most
    else:
        static = _whole(static, "num_speculative_tokens", 0)
        if most > static:
            raise ValueError(
                f"speculative_config.num_speculative_tokens_per_batch_size asks for {most} "
                f"drafts, more than num_speculative_tokens {static}"
            )
    if static > MAX_DRAFTS:
        raise ValueError(
            f"speculative_config: {static} drafts a step are more than the {MAX_DRAFTS} possible"
        )
    return SpeculativeConfig(method, static, ranges, lowest, highest, adaptive, model)


def _fields_of(setting: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(setting, str):
        try:
            setting = json.loads(setting)
        except json.JSONDecodeError as error:
            raise ValueError(f"speculative_config is not JSON: {error}") from None
    if not isinstance(setting, dict):
        raise ValueError(f"speculative_config must be a JSON object, got {setting!r}")
    return setting


def _model(method: str, model: Any) -> str:
    if method in WITH_FOLDER:
        if not isinstance(model, str) or not model:
            raise ValueError(
                f"speculative_config.model must name the drafter of method {method}, got {model!r}"
            )
        return model
    if model is not None:
        raise ValueError(
            f"speculative_config.model is for methods {', '.join(WITH_FOLDER)}, not for {method}"
        )
    return ""


def _lookup(fields: dict[str, Any]) -> tuple[int, int]:
    """Shortest and longest n-gram to look up; one that is not given equals the other."""
    low, high = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
    if low is None and high is None:
        return DEFAULT_LOOKUP, DEFAULT_LOOKUP
    low = _whole(high if low is None else low, "prompt_lookup_min", 1)
    high = _whole(low if high is None else high, "prompt_lookup_max", 1)
    if low > high:
        raise ValueError(
            f"speculative_config.prompt_lookup_min {low} is more than prompt_lookup_max {high}"
        )
    return low, high


def _ranges(table: Any) -> tuple[Range, ...]:
    name = "num_speculative_tokens_per_batch_size"
    if not isinstance(table, list | tuple) or not table:
        raise ValueError(f"speculative_config.{name} must be a list of [first, last, K], not empty")
    ranges = []
    for entry in table:
        if not isinstance(entry, list | tuple) or len(entry) != 3:
            raise ValueError(
                f"speculative_config.{name}: {entry!r} is not of the form [first, last, K]"
            )
        first, last = _whole(entry[0], name, 1), _whole(entry[1], name, 1)
        if first > last:
            raise ValueError(f"speculative_config.{name}: the range {first} to {last} is inverted")
        ranges.append((first, last, _whole(entry[2], name, 0)))
    ranges.sort()
    if ranges[0][0] != 1:
        raise ValueError(
            f"speculative_config.{name}: the ranges must start at batch size 1, not {ranges[0][0]}"
        )
    for (_, last, _), (first, _, _) in zip(ranges, ranges[1:], strict=False):
        if first <= last:
            raise ValueError(f"speculative_config.{name}: ranges overlap at batch size {first}")
        if first > last + 1:
            raise ValueError(
                f"speculative_config.{name}: batch sizes {last + 1} to {first - 1} are in no range"
            )
    return tuple(ranges)


def _whole(value: Any, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"speculative_config.{name} takes whole numbers of at least {least}, got {value!r}"
        )
    return value
