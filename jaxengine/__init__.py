"""jaxengine: an LLM inference engine on JAX. Public names load lazily, so that processes
without a device (API server, supervisor) never import JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxengine.config import EngineConfig as EngineConfig
    from jaxengine.front.async_llm import AsyncLLM as AsyncLLM
    from jaxengine.front.llm import LLM as LLM
    from jaxengine.sampling_params import SamplingParams as SamplingParams
    from jaxengine.text.outputs import CompletionOutput as CompletionOutput
    from jaxengine.text.outputs import RequestOutput as RequestOutput

_HOME = {
    "LLM": "jaxengine.front.llm",
    "AsyncLLM": "jaxengine.front.async_llm",
    "SamplingParams": "jaxengine.sampling_params",
    "EngineConfig": "jaxengine.config",
    "RequestOutput": "jaxengine.text.outputs",
    "CompletionOutput": "jaxengine.text.outputs",
}
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxengine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
