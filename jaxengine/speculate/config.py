"""`--speculative-config`: which drafter, and how many drafts at which batch size. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxengine.json_setting import json_object
from jaxengine.speculate.known_fields import without_fixed

METHODS = ("ngram", "suffix", "eagle", "draft_model", "mtp")
WITH_MODEL = ("eagle", "draft_model", "mtp")  # drafted by a model on the device
WITH_FOLDER = ("eagle", "draft_model")  # ... that `model` names
ALIASES = {"eagle3": "eagle", "ngram_gpu": "ngram", "deepseek_mtp": "mtp"}  # vLLM's names
MAX_DRAFTS = 128
SUFFIX_DRAFTS = 7  # most of a step, when none are given; the trie often has fewer
NO_LIMIT = 2**31 - 1  # tokens
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
    "disable_by_batch_size",
    "max_model_len",
    "revision",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)


@dataclass(frozen=True)
class SuffixConfig:
    """See `SuffixProposer`."""

    max_tree_depth: int = 24
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    shares: bool = True  # outputs of requests that ended serve others


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
    revision: str | None = None  # of a drafter on the hub
    max_model_len: int = NO_LIMIT  # tokens of a request that is drafted for
    suffix: SuffixConfig = SuffixConfig()

    @property
    def has_model(self) -> bool:
        """Drafts come from a model on the device."""
        return self.method in WITH_MODEL


def parse_speculative_config(setting: str | dict[str, Any]) -> SpeculativeConfig:
    """From the JSON text of the flag, or the object itself. Raises ValueError naming the field."""
    fields = without_fixed(json_object(setting, "speculative_config"))
    for name in fields:
        if name not in _FIELDS:
            raise ValueError(
                f"speculative_config has no field {name!r}; it has {', '.join(_FIELDS)}"
            )
    method = _method(fields)
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
    if static is None and method == "suffix" and not ranges:
        static = SUFFIX_DRAFTS
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
    if fields.get("disable_by_batch_size") is not None:
        if ranges:
            raise ValueError(
                "speculative_config has disable_by_batch_size and "
                "num_speculative_tokens_per_batch_size; the second one can say both"
            )
        last = _whole(fields["disable_by_batch_size"], "disable_by_batch_size", 1)
        ranges = ((1, last, static), (last + 1, last + 1, 0))
    longest = fields.get("max_model_len")
    return SpeculativeConfig(
        method,
        static,
        ranges,
        lowest,
        highest,
        adaptive,
        model,
        _revision(method, fields.get("revision")),
        NO_LIMIT if longest is None else _whole(longest, "max_model_len", 1),
        _suffix(fields),
    )


def _method(fields: dict[str, Any]) -> Any:
    """The method, under the name that it has here; guessed from the drafter's name without one."""
    method, model = fields.get("method"), fields.get("model")
    if method is None and isinstance(model, str):
        if model in METHODS:
            method = model
        else:
            method = "eagle" if "eagle" in model.lower() else "draft_model"
    return ALIASES.get(method, method) if isinstance(method, str) else method


def _revision(method: str, revision: Any) -> str | None:
    if revision is not None and (method not in WITH_FOLDER or not isinstance(revision, str)):
        raise ValueError(
            f"speculative_config.revision is the hub revision of the drafter of method "
            f"{' or '.join(WITH_FOLDER)}, got {revision!r} for {method}"
        )
    return revision


def _suffix(fields: dict[str, Any]) -> SuffixConfig:
    start = "suffix_decoding_"

    def given(name: str, default: Any) -> Any:
        value = fields.get(start + name)
        return default if value is None else value

    default = SuffixConfig()
    depth = _whole(given("max_tree_depth", default.max_tree_depth), start + "max_tree_depth", 3)
    cached = _whole(given("max_cached_requests", 1), start + "max_cached_requests", 0)
    rates = []
    for name, most in (("max_spec_factor", float("inf")), ("min_token_prob", 1.0)):
        value = given(name, getattr(default, name))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            limit = "at least 0" if most > 1 else "from 0 to 1"
            raise ValueError(
                f"speculative_config.{start}{name} takes numbers {limit}, got {value!r}"
            )
        rates.append(float(value))
    factor, least = rates
    return SuffixConfig(depth, factor, least, shares=cached > 0)


def _model(method: str, model: Any) -> str:
    if method in WITH_FOLDER:
        if not isinstance(model, str) or not model:
            raise ValueError(
                f"speculative_config.model must name the drafter of method {method}, got {model!r}"
            )
        return model
    if model is not None and model != method:  # vLLM's users name a method in it too
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
