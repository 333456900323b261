"""Going on with a request on another rank, so that its client sees no gap. Pure functions.

Tokens are a function of the sequence so far, the seed and the position, so a greedy or seeded
request continues exactly from its prompt and the tokens already given out, which become the
prompt of a new request. What looks at output tokens alone (presence and frequency penalties, bad
words, grammars, thinking budgets) would see the wrong output then: such a request starts again from
its own prompt, and the tokens that were given out already are dropped.
"""

from __future__ import annotations

from msgspec.structs import replace

from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import EngineOutput, EngineRequest


def replayable(params: SamplingParams, num_tokens: int) -> bool:
    """Whether another rank would say the same after `num_tokens` tokens."""
    return num_tokens == 0 or params.greedy or params.seed is not None


def continuation(
    request: EngineRequest, tokens: list[int], scored: bool
) -> tuple[EngineRequest, int]:
    """The request to send instead, and how many of its first tokens to drop.

    `tokens`: given out already, fewer than max_tokens. `scored`: so were the prompt's
    log-probabilities.

    A request with prompt [1, 2, 3] and max_tokens 10 has given out [7, 8] when its rank fails. It
    goes on as a request with prompt [1, 2, 3, 7, 8] and max_tokens 8, of which nothing is dropped.
    With a presence penalty, which counts output tokens only, it is sent again as it was, and its
    first 2 tokens are dropped.
    """
    params = request.params
    if scored and params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None, skip_reading_prefix_cache=None)
    done = len(tokens)
    if done == 0 or _reads_output(params):
        return replace(request, params=params), done
    params = replace(
        params,
        max_tokens=None if params.max_tokens is None else params.max_tokens - done,
        min_tokens=max(0, params.min_tokens - done),
    )
    prompt = [*request.prompt_token_ids, *tokens]
    return replace(request, prompt_token_ids=prompt, params=params), 0


def _reads_output(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None
    )


def drop_first(output: EngineOutput, count: int) -> EngineOutput:
    """The output without its first `count` tokens."""
    logprobs = output.logprobs
    return replace(
        output,
        new_token_ids=output.new_token_ids[count:],
        logprobs=None if logprobs is None else logprobs[count:],
    )
