"""The generate command: one prompt through an engine of its own."""

from __future__ import annotations

from dataclasses import replace

from jaxengine import garbage
from jaxengine.cli.preflight import preflight
from jaxengine.config import EngineConfig
from jaxengine.front.llm import LLM
from jaxengine.progress import quiet_below
from jaxengine.sampling_params import SamplingParams
from jaxengine.validation import Limits, check_params

SHORT_PROMPT = 160  # bytes, some forty tokens

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
    if config.runner.warmup == "auto":
        config = _for_one_prompt(config, len(prompt.encode()), params.greedy)
    setup_logging(config.server.log_level)
    garbage.pause()
    return _generate(config, prompt, params)


def _for_one_prompt(config: EngineConfig, size: int, greedy: bool) -> EngineConfig:
    """Programs for other requests would only take its time. A short prompt goes through the decode
    program, token by token: sooner done than another program is compiled, or read."""
    runner = replace(config.runner, warmup="greedy" if greedy else "first")
    scheduler = config.scheduler
    asked = scheduler.max_num_batched_tokens or scheduler.max_num_seqs
    speculates = scheduler.speculative_config is not None
    if size > SHORT_PROMPT or asked or speculates or not scheduler.enable_chunked_prefill:
        return replace(config, runner=runner)
    scheduler = replace(scheduler, max_num_seqs=1, max_num_batched_tokens=1)
    return replace(config, runner=runner, scheduler=scheduler)


def _generate(config: EngineConfig, prompt: str, params: SamplingParams) -> int:
    with LLM.from_config(config) as llm:
        garbage.settle(one_answer=True)
        for output in llm.stream(prompt, params):
            for completion in output.outputs:
                print(completion.text, end="", flush=True)
                if completion.error is not None:
                    raise ValueError(completion.error)
        print()
    return 0
