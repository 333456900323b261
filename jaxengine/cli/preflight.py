"""What can be known to be wrong before a process is started, said in one sentence at once.

The engine checks all of it again, and more; here is what needs neither JAX nor the weights.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jaxengine import platform
from jaxengine.config import EngineConfig

_CACHE_ROOM = 64 * 2**20  # bytes: about one model's programs


def preflight(config: EngineConfig) -> None:
    """Raises ValueError naming the setting or file at fault."""
    _check_cache(config.runner.compilation_cache_dir)
    _check_template(config.model.chat_template)
    _check_model(config)


def _check_cache(setting: str | None) -> None:
    folder = platform.cache_dir(setting)
    if folder is None:
        return
    hint = 'give another --compilation-cache-dir, or "off"'
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"the compilation cache {folder} cannot be made: {why}; {hint}") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"the compilation cache {folder} cannot be written; {hint}")
    if free < _CACHE_ROOM:
        raise ValueError(
            f"the compilation cache {folder} has {free / 2**20:.0f} MiB left on its disk, less "
            f"than the {_CACHE_ROOM // 2**20} MiB that programs take; free some, or {hint}"
        )


def _check_template(source: str | None) -> None:
    if source is None or "{" in source or "\n" in source:  # the template itself
        return
    if not Path(source).is_file():
        raise ValueError(f"--chat-template {source}: no such file")


def _check_model(config: EngineConfig) -> None:
    """The files of a local model, and whether its config.json is of a family that runs."""
    from jaxengine.weights.resolve import is_hub_id, resolve_model

    model = config.model
    if is_hub_id(model.model):  # not downloaded here
        return
    files = resolve_model(model.model)
    if files.config is None:
        return
    from jaxengine.models.families import spec_from_config

    spec = spec_from_config(files.config)
    if not any(files.path.glob("*.safetensors")):
        raise ValueError(f"folder {files.path} has a config.json but no .safetensors file")
    if model.max_model_len is not None and model.max_model_len > spec.max_position:
        raise ValueError(
            f"--max-model-len {model.max_model_len} is more than the {spec.max_position} "
            f"positions of the model"
        )
