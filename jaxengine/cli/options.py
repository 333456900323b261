"""Flags from the config dataclasses: one field is one flag, one YAML key, one Python keyword."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

import cyclopts
import yaml
from cyclopts import Group, Parameter

from jaxengine.cli.counts import count_keys, count_words
from jaxengine.config import (
    HARMONY_PARSERS,
    PARTS,
    CacheConfig,
    DataParallelConfig,
    EngineConfig,
    FaultConfig,
    ModelConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
    template_kwargs,
)
from jaxengine.frontend.pooling import pooling_settings
from jaxengine.metrics.tracing import check_tracing
from jaxengine.vllm_names import translate, translate_keys

# The order of `--help`: what most people set comes first.
_GROUPS = [
    Group.create_ordered(name)
    for name in (
        "Model",
        "Server",
        "KV cache and offload",
        "Scheduler and speculation",
        "Devices in one engine",
        "Data parallel engines",
        "Fault tolerance",
        "Runner and start",
    )
]
_MODEL, _SERVER, _CACHE, _SCHEDULER, _DEVICES, _DATA_PARALLEL, _FAULT, _RUNNER = _GROUPS

# The positional argument of commands.
Model = Annotated[str | None, Parameter(name="MODEL", show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """All settings, flattened into flags."""

    model: Annotated[ModelConfig, Parameter(name="*", group=_MODEL)] = field(
        default_factory=ModelConfig
    )
    cache: Annotated[CacheConfig, Parameter(name="*", group=_CACHE)] = field(
        default_factory=CacheConfig
    )
    scheduler: Annotated[SchedulerConfig, Parameter(name="*", group=_SCHEDULER)] = field(
        default_factory=SchedulerConfig
    )
    parallel: Annotated[ParallelConfig, Parameter(name="*", group=_DEVICES)] = field(
        default_factory=ParallelConfig
    )
    data_parallel: Annotated[DataParallelConfig, Parameter(name="*", group=_DATA_PARALLEL)] = field(
        default_factory=DataParallelConfig
    )
    fault: Annotated[FaultConfig, Parameter(name="*", group=_FAULT)] = field(
        default_factory=FaultConfig
    )
    runner: Annotated[RunnerConfig, Parameter(name="*", group=_RUNNER)] = field(
        default_factory=RunnerConfig
    )
    server: Annotated[ServerConfig, Parameter(name="*", group=_SERVER, json_list=True)] = field(
        default_factory=ServerConfig
    )  # lists as JSON, or one value a flag


def shown_default(value: Any) -> str:
    """A default as `--help` shows it; None is no value of its own."""
    if value is None:
        return "unset"
    if value == [] or value == "":
        return "empty"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def to_config(model: str | None, options: Options | None) -> EngineConfig:
    """The engine's configuration; the positional `model` is the flag --model by another name."""
    options = options or Options()
    chosen = options.model
    if model is not None:
        if chosen.model not in (ModelConfig().model, model):
            raise ValueError(f"two models are given: {model} and --model {chosen.model}")
        chosen = dataclasses.replace(chosen, model=model)
    config = EngineConfig(**{name: getattr(options, name) for name in PARTS} | {"model": chosen})
    check(config)
    return config


_POSITIVE = (
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
)
_NOT_NEGATIVE = (
    "long_prefill_token_threshold",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "shutdown_timeout",
    "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold",
)


def check(config: EngineConfig) -> None:
    """Raises ValueError naming the flag of the first value out of range."""
    flat: dict[str, Any] = {}
    for part in dataclasses.fields(config):
        flat |= vars(getattr(config, part.name))
    for name in _POSITIVE:
        if flat[name] is not None and flat[name] < 1:
            raise ValueError(f"{flag(name)} must be at least 1, got {flat[name]}")
    for name in _NOT_NEGATIVE:
        if flat[name] is not None and flat[name] < 0:
            raise ValueError(f"{flag(name)} must not be negative, got {flat[name]}")
    if not 0 < flat["gpu_memory_utilization"] <= 1:
        given = flat["gpu_memory_utilization"]
        raise ValueError(f"--gpu-memory-utilization must be above 0 and at most 1, got {given}")
    if not 0 <= flat["watermark"] < 1:
        raise ValueError(f"--watermark must be from 0 to below 1, got {flat['watermark']}")
    if flat["enable_auto_tool_choice"] and flat["tool_call_parser"] is None:
        raise ValueError("--enable-auto-tool-choice needs --tool-call-parser")
    parsers = (config.server.reasoning_parser, config.server.tool_call_parser)
    channels = [p in HARMONY_PARSERS for p in parsers if p is not None]
    if any(channels) and not all(channels):
        raise ValueError(
            f"--reasoning-parser {parsers[0]} does not go with --tool-call-parser {parsers[1]}"
        )
    for name in ("api_key", "admin_api_key"):
        if flat[name] == "":  # an unset shell variable must not open the server
            raise ValueError(f"{flag(name)} must not be empty")
    pooling_settings(config.model.pooler_config)
    check_tracing(config.server.otlp_traces_endpoint)
    template_kwargs(config.server.default_chat_template_kwargs)
    if not 0 <= flat["port"] <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, got {flat['port']}")
    if flat["max_logprobs"] < -1:
        raise ValueError(f"--max-logprobs must be at least -1, got {flat['max_logprobs']}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def split_argv(argv: list[str]) -> tuple[list[str], str | None]:
    """Take `--config FILE` out, and turn `--async-scheduling false` into `--async-scheduling=false`
    (a flag's value form, for every boolean field). vLLM's own names become ours, and counts such
    as 32k plain numbers."""
    argv = translate(argv) if argv[:1] in (["serve"], ["run-batch"]) else argv
    words = iter(count_words(argv))
    booleans = _boolean_flags()
    rest: list[str] = []
    config = None
    for word in words:
        if word == "--config":
            config = next(words, None)
            if config is None:
                raise ValueError("--config needs a file")
        elif word.startswith("--config="):
            config = word.removeprefix("--config=")
        elif rest and rest[-1] in booleans and word.lower() in ("true", "false"):
            rest[-1] += "=" + word.lower()
        else:
            rest.append(word)
    if config is not None and not os.path.isfile(config):
        raise ValueError(f"--config {config}: no such file")
    return rest, config


def _boolean_flags() -> set[str]:
    flags = set()
    for part in PARTS.values():
        for name, kind in get_type_hints(part).items():
            if kind is bool:
                flags |= {flag(name), "--" + name}
    return flags


def yaml_config(path: str) -> cyclopts.config.Dict:
    """Settings from a file; the command line wins. Objects become the JSON that their flags take.
    Raises ValueError for a file that is not YAML, or no mapping."""
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"--config {path} cannot be read: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} must hold settings, one `name: value` a line")
    known = count_keys(translate_keys({str(name): value for name, value in found.items()}))
    settings = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in known.items()}
    return cyclopts.config.Dict(settings, source=path, use_commands_as_keys=False)
