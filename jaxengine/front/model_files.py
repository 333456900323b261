"""What the front reads of a model beside the engine: tokenizer, template, sampling defaults."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jaxengine.config import EngineConfig
from jaxengine.sampling_params import SamplingParams
from jaxengine.settings.generation import generation_override
from jaxengine.text.processor import Prompt
from jaxengine.validation import RequestError

if TYPE_CHECKING:
    from jaxengine.text.tokenizer import ChatTemplate, Tokenizer
    from jaxengine.weights.resolve import ModelFiles

log = logging.getLogger(__name__)

_INLINE_CHARS = 20_000  # longer text is worked on in a thread, so that streams go on
_INLINE_IDS = 100_000
UNKNOWN = _INLINE_CHARS + 1  # the size of work that may take long
_HUGE_CHARS = 1_000_000  # work that takes seconds, one piece after the other: others find a thread
_HUGE_WORK = ThreadPoolExecutor(1, "jaxengine-huge")


@dataclass(frozen=True)
class FrontModel:
    """`tokenizer` and `chat_template` are None with skip_tokenizer_init."""

    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)


def load_front(config: EngineConfig, skip_tokenizer: bool = False) -> FrontModel:
    """Read tokenizer, chat template and sampling defaults, for whichever face asks. Raises
    ValueError naming the file or setting, and OSError."""
    from jaxengine.text.tokenizer import load_tokenizer
    from jaxengine.weights.resolve import resolve_model

    model = config.model
    files = resolve_model(model.model, model.revision, model.download_dir)
    defaults = _sampling_defaults(model.generation_config, files)
    if defaults:
        log.info("sampling defaults of the model's generation_config: %s", defaults)
    defaults |= generation_override(model.override_generation_config)
    if skip_tokenizer:
        return FrontModel(sampling_defaults=defaults)
    tokenizer = load_tokenizer(files, model.tokenizer)
    template: ChatTemplate = tokenizer.chat_template
    if model.chat_template is not None:
        template = read_template(model.chat_template)
    return FrontModel(tokenizer, template, defaults)


def _sampling_defaults(setting: str, files: ModelFiles) -> dict[str, Any]:
    """What --generation-config stands for: auto, engine (vllm), or a folder."""
    from jaxengine.weights.generation import GENERATION_CONFIG, usable_defaults
    from jaxengine.weights.resolve import read_json

    if setting in ("engine", "vllm"):
        return {}
    if setting == "auto":
        return dict(files.generation_config)
    path = Path(setting) / GENERATION_CONFIG
    if not path.is_file():
        raise ValueError(f"generation_config must be auto, engine or a folder; no file {path}")
    return usable_defaults(read_json(path), path)


def read_template(source: str) -> str:
    """A chat template given as text (it has braces, or lines), or as a file's path. Raises
    RequestError."""
    if "{" in source or "\n" in source:
        return source
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(
            "chat_template", f"chat_template: cannot read {source!r}: {why}"
        ) from error


def served_name(config: EngineConfig) -> str:
    """The model's name in responses and metrics."""
    return config.server.served_model_name or config.model.model


async def off_loop[T](size: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread when `size` (characters) is big, else right here."""
    if size <= _INLINE_CHARS:
        return work()
    if size <= _HUGE_CHARS:
        return await asyncio.to_thread(work)
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_HUGE_WORK, context.run, work)


def request_size(prompt: Prompt, params: SamplingParams | None) -> int:
    """Characters to work through, or the equivalent in ids to check."""
    return _size_of(prompt) + (0 if params is None else _params_size(params))


def _params_size(params: SamplingParams) -> int:
    size = 0
    if params.structured_outputs is not None:
        for given in msgspec.structs.astuple(params.structured_outputs):
            size += UNKNOWN if isinstance(given, Mapping) else _size_of(given)
    for value in (params.stop, params.bad_words, params.stop_token_ids, params.allowed_token_ids):
        size += _size_of(value)
    if params.logit_bias is not None:
        size += 10 * len(params.logit_bias)
    return size


def _size_of(value: object) -> int:
    """Of a text, of ids, or of a list or mapping that holds some; other values are refused soon."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return _size_of(value.get("prompt") or value.get("prompt_token_ids"))
    if not isinstance(value, list | tuple):
        return 0
    if value and isinstance(value[0], str):
        return sum(len(word) for word in value if isinstance(word, str))
    return len(value) * _INLINE_CHARS // _INLINE_IDS
