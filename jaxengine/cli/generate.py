"""The generate command: one prompt through an engine of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from jaxengine.config import EngineConfig
from jaxengine.progress import quiet_below
from jaxengine.sampling_params import SamplingParams


def run_generate(config: EngineConfig, prompt: str, max_tokens: int, temperature: float) -> int:
    """Print the continuation as it comes. Raises ValueError for bad input or an unusable model."""
    from jaxengine.cli.serve import setup_logging

    level = config.server.log_level
    quiet_below(level)
    if level == "info":  # the answer matters here, not the engine's log
        config = replace(config, server=replace(config.server, log_level="warning"))
    if config.runner.warmup == "auto":  # programs for other requests would only take its time
        config = replace(config, runner=replace(config.runner, warmup="first"))
    setup_logging(config.server.log_level)
    return asyncio.run(_generate(config, prompt, max_tokens, temperature))


async def _generate(config: EngineConfig, prompt: str, max_tokens: int, temperature: float) -> int:
    from jaxengine.engine.async_llm import AsyncLLM, EngineDeadError, EngineStartError

    try:
        engine = await AsyncLLM.start(config)
    except EngineStartError as error:
        raise ValueError(str(error)) from error
    try:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
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
