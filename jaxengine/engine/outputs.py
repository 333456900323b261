"""Requests of the wire turned into the scheduler's, and results of steps into outputs."""

from __future__ import annotations

from jaxengine.engine.grammars import Grammars
from jaxengine.engine.logprobs import PromptLogprobs, logprobs_of
from jaxengine.engine.packer import Packer
from jaxengine.engine.pooling import Pooled
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.updates import RequestUpdate
from jaxengine.wire.messages import INVALID_REQUEST, EngineOutput, EngineRequest

NAN_ERROR = "the model's logits held NaN or infinity, or no token was legal"


def make_request(
    wire: EngineRequest, max_model_len: int, packer: Packer, grammars: Grammars
) -> Request:
    """The scheduler's request. Raises ValueError for what this engine cannot do."""
    params = wire.params
    limit = max_model_len - len(wire.prompt_token_ids)
    # Positions that are not computed have no logits.
    skip_cache = bool(params.skip_reading_prefix_cache) or params.prompt_logprobs is not None
    skip_cache |= wire.pooling == "mean"
    matcher = grammars.matcher(wire)
    grammar = grammars.with_thought(wire, matcher)
    return Request(
        wire.request_id,
        wire.prompt_token_ids,
        max_tokens=max(limit, 0) if params.max_tokens is None else params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids or (),
        # A grammar ends with an end token, whatever ignore_eos says.
        eos_token_ids=() if params.ignore_eos and matcher is None else wire.eos_token_ids,
        priority=wire.priority,
        arrival_time=wire.arrival_time,
        cache_salt=wire.cache_salt,
        skip_reading_prefix_cache=skip_cache,
        params=packer.prepare(wire),
        grammar=grammar,
        grammar_from=0 if grammar is None else grammar.first,
    )


# -- the loop ---------------------------------------------------------------------------


def refusal(request_id: str, reason: str) -> EngineOutput:
    """The end of a request that is the client's mistake."""
    return EngineOutput(
        request_id, [], finish_reason="error", stop_reason=INVALID_REQUEST, error=reason
    )


class Collected:
    """Results about prompts, collected chunk by chunk until a prompt is whole."""

    def __init__(self) -> None:
        self._prompt_logprobs, self._pooled = PromptLogprobs(), Pooled()

    @property
    def is_empty(self) -> bool:
        return not self._prompt_logprobs and not self._pooled

    def add(self, plan: StepPlan, result: StepResult) -> None:
        """A step's part."""
        for row, part in result.prompt_logprobs.items():
            self._prompt_logprobs.add(plan.requests[row], int(plan.start[row]), part)
        if result.pooled is not None:
            for row, request in enumerate(plan.requests):
                if request.params.wire.pooling is not None:
                    self._pooled.add(request, int(plan.start[row]), result.pooled[row])

    def drop(self, request_id: str) -> None:
        """The request has ended."""
        self._prompt_logprobs.drop(request_id)
        self._pooled.drop(request_id)

    def output(self, update: RequestUpdate, result: StepResult) -> EngineOutput:
        """The output of a request after a step."""
        request = update.request
        wire: EngineRequest = request.params.wire
        logprobs = None
        if wire.params.logprobs is not None and result.logprob_ids is not None:
            logprobs = logprobs_of(
                result, update.row, len(update.new_token_ids), wire.params.logprobs
            )
        output = EngineOutput(
            request.request_id,
            update.new_token_ids,
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
        )
        if wire.params.prompt_logprobs is not None and update.first == 0:
            output.prompt_logprobs = self._prompt_logprobs.take(request)
        if wire.pooling is not None and update.finish_reason != "error":
            output.embedding = self._pooled.take(request)
        elif update.finish_reason is not None:
            self._pooled.drop(request.request_id)
        if update.first == 0:
            output.num_external_tokens = request.num_external_tokens
            output.times = (request.queued_time, request.first_scheduled_time)
        if update.finish_reason == "error":
            reason = None if request.grammar is None else request.grammar.failure
            output.error = NAN_ERROR if reason is None else reason
            output.stop_reason = None if reason is None else INVALID_REQUEST
        return output
