"""What the front reads of a model beside the engine: tokenizer, template, sampling defaults."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxengine.config import EngineConfig
from jaxengine.frontend.processor import Prompt, generation_override
from jaxengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxengine.frontend.tokenizer import ChatTemplate, Tokenizer

log = logging.getLogger(__name__)

_INLINE_CHARS = 20_000  # longer text is worked on in a thread, so that streams go on
_INLINE_IDS = 100_000


@dataclass(frozen=True)
class FrontModel:
    """All None or empty with skip_tokenizer_init."""

    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate = None
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


def load_front(config: EngineConfig, skip_tokenizer: bool = False) -> FrontModel:
    """Read tokenizer, chat template and generation_config. Raises ValueError and OSError."""
    from jaxengine.frontend.tokenizer import load_tokenizer
    from jaxengine.weights.resolve import resolve_model

    model = config.model
    if skip_tokenizer:
        return FrontModel()
    files = resolve_model(model.model, model.revision, model.download_dir)
    tokenizer = load_tokenizer(files, model.tokenizer)
    template: ChatTemplate = tokenizer.chat_template
    if model.chat_template is not None:
        template = _read_template(model.chat_template)
    defaults = {} if model.generation_config == "engine" else dict(files.generation_config)
    if defaults:
        log.info("sampling defaults of the model's generation_config: %s", defaults)
    defaults |= generation_override(model.override_generation_config)
    return FrontModel(tokenizer, template, defaults)


def _read_template(source: str) -> str:
    """A template given as text, or as a file's path."""
    if "{" in source or "\n" in source:
        return source
    with open(source, encoding="utf-8") as file:
        return file.read()


def served_name(config: EngineConfig) -> str:
    """The model's name in responses and metrics."""
    return config.server.served_model_name or config.model.model


async def off_loop[T](size: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread when `size` (characters) is big, else right here."""
    return await asyncio.to_thread(work) if size > _INLINE_CHARS else work()


def request_size(prompt: Prompt, params: SamplingParams | None) -> int:
    """Characters to work through, or the equivalent in ids to check."""
    constraint = None if params is None else params.structured_outputs
    return _prompt_size(prompt) + (0 if constraint is None else len(str(constraint)))


def _prompt_size(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return len(prompt) * _INLINE_CHARS // _INLINE_IDS
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    return len(text) if isinstance(text, str) else len(ids or ()) * _INLINE_CHARS // _INLINE_IDS
