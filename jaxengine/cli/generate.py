"""The generate command: one prompt through an engine of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

from jaxengine.cli.preflight import preflight
from jaxengine.config import EngineConfig
from jaxengine.frontend.validation import Limits, check_params
from jaxengine.progress import quiet_below
from jaxengine.sampling_params import SamplingParams

# What can be said of parameters before the model is known.
_ANY_MODEL = Limits(max_model_len=2**31 - 1, vocab_size=2**31 - 1)


def run_generate(config: EngineConfig, prompt: str, max_tokens: int, temperature: float) -> int:
    """Print the continuation as it comes. Raises ValueError for bad input or an unusable model."""
    from jaxengine.cli.serve import setup_logging

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    check_params(params, _ANY_MODEL)
    if not prompt:
        raise ValueError("the prompt is empty")
    preflight(config)
    level = config.server.log_level
    quiet_below(level)
    if level == "info":  # the answer matters here, not the engine's log
        config = replace(config, server=replace(config.server, log_level="warning"))
    if config.runner.warmup == "auto":  # programs for other requests would only take its time
        first: Literal["greedy", "first"] = "greedy" if params.greedy else "first"
        config = replace(config, runner=replace(config.runner, warmup=first))
    setup_logging(config.server.log_level)
    return asyncio.run(_generate(config, prompt, params))


async def _generate(config: EngineConfig, prompt: str, params: SamplingParams) -> int:
    from jaxengine.engine.async_llm import AsyncLLM, EngineDeadError, EngineStartError

    try:
        engine = await AsyncLLM.start(config)
    except EngineStartError as error:
        raise ValueError(str(error)) from error
    try:
        async for output in engine.generate(prompt, params, kind="delta"):
            for completion in output.outputs:
                print(completion.text, end="", flush=True)
                if completion.error is not None:
                    raise ValueError(completion.error)
        print()
    except EngineDeadError as error:
        raise ValueError(str(error)) from error
    finally:
        await engine.shutdown()
    return 0
