"""The generate command: one prompt through an engine of its own."""

from __future__ import annotations

import asyncio

from jaxengine.config import EngineConfig
from jaxengine.sampling_params import SamplingParams


def run_generate(config: EngineConfig, prompt: str, max_tokens: int, temperature: float) -> int:
    """Print the continuation as it comes. Raises ValueError for bad input or an unusable model."""
    from jaxengine.cli.serve import setup_logging

    setup_logging("warning" if config.server.log_level == "info" else config.server.log_level)
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
