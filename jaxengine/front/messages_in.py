"""Messages of engines on their way in: outputs joined while the front lags, and calls answered."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Iterable
from typing import Any

from jaxengine.wire.messages import EngineOutput, EngineOutputs, UtilityResult

MOST_OUTPUTS = 4096  # of one joined message


def join_outputs(first: EngineOutputs, second: EngineOutputs) -> EngineOutputs:
    """Both as one message of the same engine, each request's outputs joined; may change both. A
    front that lags behind so handles fewer, longer deltas instead of falling further back."""
    at = {output.request_id: output for output in first.outputs}
    for output in second.outputs:
        before = at.get(output.request_id)
        if before is None or before.finish_reason is not None:  # an id may be used again
            at[output.request_id] = output
            first.outputs.append(output)
        else:
            _append(before, output)
    if first.stats is not None and second.stats is not None:
        # The one thing in stats that is of the time since the last ones.
        for name, seconds in first.stats.block_seconds.items():
            later = second.stats.block_seconds
            later[name] = seconds + later.get(name, [])
    first.stats = second.stats or first.stats
    return first


def _append(before: EngineOutput, after: EngineOutput) -> None:
    before.new_token_ids += after.new_token_ids
    if after.logprobs is not None:
        before.logprobs = (before.logprobs or []) + after.logprobs
    before.prompt_logprobs = before.prompt_logprobs or after.prompt_logprobs
    before.embedding = before.embedding or after.embedding
    before.times = before.times or after.times
    before.num_cached_tokens = before.num_cached_tokens or after.num_cached_tokens
    before.num_external_tokens = before.num_external_tokens or after.num_external_tokens
    before.num_preemptions = max(before.num_preemptions, after.num_preemptions)
    before.finish_reason = after.finish_reason
    before.stop_reason, before.error = after.stop_reason, after.error


def answer_call(calls: dict[int, Future[Any]], result: UtilityResult) -> None:
    """Give the result to its caller: a RuntimeError when the engine told an error."""
    future = calls.pop(result.call_id, None)
    if future is None or future.done():
        return
    if result.error is None:
        future.set_result(result.result)
    else:
        future.set_exception(RuntimeError(result.error))


def fail_all(waiting: Iterable[Future[Any]], error: Exception) -> None:
    """End with `error` what has not ended."""
    for future in waiting:
        if not future.done():
            future.set_exception(error)
