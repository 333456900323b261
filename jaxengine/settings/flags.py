"""Flags from the config dataclasses: one field is one flag, one YAML key, one Python keyword."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

import cyclopts
import yaml
from cyclopts import Group, Parameter

from jaxengine.config import (
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
)
from jaxengine.settings.check import SettingError, in_flags
from jaxengine.settings.counts import count_keys, count_words
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
    with said_in_flags():
        return EngineConfig(**{name: getattr(options, name) for name in PARTS} | {"model": chosen})


@contextmanager
def said_in_flags() -> Iterator[None]:
    """Refusals of settings, in the words of who wrote them as flags."""
    try:
        yield
    except SettingError as error:
        names = [f.name for part in PARTS.values() for f in dataclasses.fields(part)]
        raise ValueError(in_flags(str(error), names)) from None


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
