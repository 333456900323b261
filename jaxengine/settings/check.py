"""Checks of settings. `EngineConfig` runs them when it is made, so that every door does: command
line, YAML files, `LLM`, `AsyncLLM`, `build_app`, the benches.

A value is held against its field's type (None means the default), then against its range, then
against the others. Nothing here imports JAX; the readers of JSON settings load when one is given.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxengine.config import EngineConfig


class SettingError(ValueError):
    """A setting that cannot be used. `field` is its name as a keyword; the message begins with it,
    or names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


# Smallest value of whole numbers and sizes.
_AT_LEAST = dict.fromkeys(
    (
        "max_model_len",
        "block_size",
        "num_gpu_blocks_override",
        "kv_cache_memory_bytes",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_request_bytes",
        "api_server_count",
        "stream_interval",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "attention_data_parallel_size",
        "data_parallel_size",
        "data_parallel_size_local",
        "nnodes",
        "master_port",
    ),
    1,
) | dict.fromkeys(
    (
        "long_prefill_token_threshold",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "shutdown_timeout",
        "sse_keep_alive_interval",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "num_redundant_experts",
        "node_rank",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "port",
        "metrics_port",
    ),
    0,
)
_AT_LEAST |= {"max_logprobs": -1, "seed": -(2**63)}
# the port behind master_port is used too
_AT_MOST = {"port": 65535, "metrics_port": 65535, "master_port": 65534, "seed": 2**63 - 1}
# (above, at most): shares and sizes that are no whole numbers
_WITHIN = {
    "gpu_memory_utilization": (0.0, 1.0),
    "kv_cache_metrics_sample": (0.0, 1.0),
    "kv_offloading_size": (0.0, math.inf),
}
_NOT_EMPTY = (
    "model",
    "host",
    "uds",
    "api_key",
    "admin_api_key",
    "api_key_file",
    "admin_api_key_file",
    "served_model_name",
    "master_addr",
)


def check_config(config: EngineConfig) -> EngineConfig:
    """The configuration with None replaced by defaults. Raises SettingError for the first value
    that is wrong; a ValueError of a JSON setting's reader names its field."""
    parts = {f.name: checked_part(getattr(config, f.name)) for f in dataclasses.fields(config)}
    for name, part in parts.items():
        object.__setattr__(config, name, part)  # the frozen object is still being made
    _check_json(config)
    _check_together(config)
    return config


def checked_part[T](part: T) -> T:
    """One part of the configuration (`CacheConfig`, say), each value of the type and within the
    range of its field. Raises SettingError."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        given = getattr(part, field.name)
        value = _typed(field, given, type(part))
        _check_range(field.name, value)
        if value is not given:
            changed[field.name] = value
    return dataclasses.replace(part, **changed) if changed else part  # type: ignore[type-var]


# -- types -----------------------------------------------------------------------------------------


@functools.cache
def _hints(part: type) -> dict[str, Any]:
    return typing.get_type_hints(part)


def _typed(field: dataclasses.Field[Any], value: Any, part: type) -> Any:
    hint = _hints(part)[field.name]
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = typing.get_args(hint) if union else (hint,)
    if value is None:
        if type(None) in kinds:
            return None
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        return field.default
    for kind in kinds:
        fitted = _fitted(kind, value)
        if fitted is not None:
            return fitted
    raise SettingError(field.name, f"{field.name} must be {_expected(kinds)}, got {_show(value)}")


def _fitted(kind: Any, value: Any) -> Any:
    """The value as one of `kind`, or None if it is none. A truth value is no number."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        same = [known for known in typing.get_args(kind) if known == value]
        return same[0] if same and type(same[0]) is type(value) else None
    if origin is list:
        words = isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
        return list(value) if words else None
    if origin is dict:
        return value if isinstance(value, Mapping) else None
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind is str:
        return os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if isinstance(value, bool):
        return None
    if kind is int:
        return _whole(value)
    if kind is float and isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    return None


def _whole(value: Any) -> int | None:
    """An int, NumPy's too, or None for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def _expected(kinds: tuple[Any, ...]) -> str:
    words = []
    for kind in kinds:
        origin = typing.get_origin(kind)
        if origin is Literal:
            known = ", ".join(map(str, typing.get_args(kind)))
            words.append(f"one of {known}" if len(typing.get_args(kind)) > 1 else known)
        elif origin is list:
            words.append("a list of strings")
        elif origin is dict:
            words.append("a JSON object")
        elif kind is not type(None):
            words.append(_WORDS[kind])
    return " or ".join(words)


_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- ranges ----------------------------------------------------------------------------------------


def _check_range(name: str, value: Any) -> None:
    if value is None:
        return
    low, high = _AT_LEAST.get(name), _AT_MOST.get(name)
    if low is not None and high is not None and not low <= value <= high:
        raise SettingError(name, f"{name} must be between {low} and {high}, got {value}")
    if low == 0 and value < 0:
        raise SettingError(name, f"{name} must not be negative, got {value}")
    if low is not None and value < low:
        raise SettingError(name, f"{name} must be at least {low}, got {value}")
    if name in _WITHIN:
        above, most = _WITHIN[name]
        if not above < value <= most:
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise SettingError(name, f"{name} must be above {above:g}{limit}, got {value}")
    if name == "watermark" and not 0 <= value < 1:
        raise SettingError(name, f"watermark must be from 0 to below 1, got {value}")
    if name in _NOT_EMPTY and not value:
        # an unset shell variable must not open the server, or name another model
        raise SettingError(name, f"{name} must not be empty")
    if name == "root_path" and value and not value.startswith("/"):
        raise SettingError(name, f"root_path must begin with /, got {value!r}")


# -- settings with a form of their own, and those that go together ---------------------------------


def _check_json(config: EngineConfig) -> None:
    from jaxengine.config import template_kwargs

    cache, model, fault = config.cache, config.model, config.fault
    if model.pooler_config is not None:
        from jaxengine.settings.pooling import pooling_settings

        pooling_settings(model.pooler_config)
    if model.override_generation_config is not None:
        from jaxengine.settings.generation import generation_override

        generation_override(model.override_generation_config)
    if cache.kv_transfer_config is not None or cache.kv_offloading_size is not None:
        from jaxengine.offload.config import parse_offload

        parse_offload(cache.kv_transfer_config, cache.kv_offloading_size)
    if cache.kv_events_config is not None:
        from jaxengine.settings.kv_events import parse_kv_events_config

        parse_kv_events_config(cache.kv_events_config)
    if config.scheduler.speculative_config is not None:
        from jaxengine.speculate.config import parse_speculative_config

        parse_speculative_config(config.scheduler.speculative_config)
    if fault.fault_tolerance_config is not None:
        from jaxengine.settings.fault import fault_settings

        fault_settings(fault)
    if fault.inject_faults is not None:
        from jaxengine.settings.faults import parse_faults

        parse_faults(fault.inject_faults)
    if config.server.otlp_traces_endpoint is not None:
        from jaxengine.settings.tracing import check_tracing

        check_tracing(config.server.otlp_traces_endpoint)
    template_kwargs(config.server.default_chat_template_kwargs)


def _check_together(config: EngineConfig) -> None:
    from jaxengine.config import HARMONY_PARSERS

    server, fault, parallel = config.server, config.fault, config.parallel
    if server.enable_auto_tool_choice and server.tool_call_parser is None:
        raise SettingError(
            "enable_auto_tool_choice", "enable_auto_tool_choice needs tool_call_parser"
        )
    parsers = (server.reasoning_parser, server.tool_call_parser)
    channels = [parser in HARMONY_PARSERS for parser in parsers if parser is not None]
    if any(channels) and not all(channels):
        raise SettingError(
            "reasoning_parser",
            f"reasoning_parser {parsers[0]} does not go with tool_call_parser {parsers[1]}",
        )
    for name in ("api_key", "admin_api_key"):
        if getattr(server, name) is not None and getattr(server, f"{name}_file") is not None:
            raise SettingError(name, f"{name} and {name}_file are two ways to say the same")
    if fault.retry_aborted_requests and not fault.enable_fault_tolerance:
        raise SettingError(
            "retry_aborted_requests", "retry_aborted_requests needs enable_fault_tolerance"
        )
    if parallel.node_rank >= parallel.nnodes:
        raise SettingError(
            "node_rank",
            f"node_rank {parallel.node_rank} is not one of the {parallel.nnodes} nodes of nnodes",
        )
    from jaxengine.settings.coupling import member_of
    from jaxengine.settings.ranks import local_ranks

    if member_of(config) is None:  # what an engine of a coupled group is told is no server's
        local_ranks(config.data_parallel)


# -- words of the command line -----------------------------------------------------


def in_flags(message: str, names: typing.Iterable[str]) -> str:
    """A message about settings, for somebody who wrote them as flags: `block_size` becomes
    --block-size. A name that is a common word (port, seed) counts at the beginning only."""
    known = sorted(names, key=len, reverse=True)
    long = "|".join(name for name in known if "_" in name)
    message = re.sub(
        rf"(?<![\w./-])({long})(?![\w.:/])", lambda m: "--" + m[0].replace("_", "-"), message
    )
    first, space, rest = message.partition(" ")
    return f"--{first}{space}{rest}" if first in known else message
