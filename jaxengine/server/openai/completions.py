"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from jaxengine.front.async_llm import AsyncLLM, RequestStream, off_loop
from jaxengine.sampling_params import SamplingParams
from jaxengine.server.errors import ApiError
from jaxengine.server.openai.bodies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    encode,
    usage_body,
)
from jaxengine.server.openai.logprobs import completion_logprobs, prompt_logprobs_body
from jaxengine.server.openai.protocol import (
    CompletionBody,
    checked_params,
    logprobs_count,
    with_usage,
)
from jaxengine.server.openapi import reference, streamed
from jaxengine.server.sse import DONE, event, sse_response
from jaxengine.server.state import Visit, visit_of
from jaxengine.server.streams import admit, close_all, final_outputs, merged, unless_hangup
from jaxengine.text.logprobs import PositionLogprobs
from jaxengine.text.outputs import CompletionOutput, RequestOutput, Usage, usage
from jaxengine.text.processor import Prompt
from jaxengine.validation import MAX_N, MAX_PROMPTS

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class _Call:
    """One call, after its fields were checked."""

    body: CompletionBody
    prompts: list[Prompt]
    params: SamplingParams
    constraint_field: str
    score_only: bool  # echo with max_tokens 0: the prompt's log-probabilities and no new text
    num_logprobs: int | None
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


@router.post(
    "/v1/completions",
    response_model=None,
    responses=streamed(400, 404, 413, 503, schema=reference(Completion)),
)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue text or token ids; a list of prompts gives n choices for each."""
    visit = visit_of(request, body)
    engine = visit.engine
    call = await off_loop(visit.size, lambda: _check(body, visit))
    streams = await unless_hangup(
        request,
        admit(
            engine, call.prompts, call.params, call.id, body, visit.placement, call.constraint_field
        ),
    )
    if body.stream:
        return await sse_response(request, _chunks(call, streams, engine), close_all(streams))
    try:
        finals = await unless_hangup(request, final_outputs(streams, call.constraint_field))
    finally:
        close_all(streams)()
    choices = []
    for at, output in enumerate(finals):
        for choice in output.outputs:
            echo = _Echo(call, output, engine)
            choices.append(echo.choice(at, output, choice))
    whole = Completion(
        call.id, call.created, call.model, choices, usage=usage_body(_usage(call, finals))
    )
    return Response(encode(whole), media_type="application/json")


def _check(body: CompletionBody, visit: Visit) -> _Call:
    prompts = split_prompts(body.prompt)
    check_sequences(len(prompts), body.n)
    if body.add_special_tokens is not None:
        prompts = [
            {"prompt": p, "add_special_tokens": body.add_special_tokens}
            if isinstance(p, str)
            else p
            for p in prompts
        ]
    defaults = visit.engine.default_params
    score_only = bool(body.echo) and body.max_tokens == 0
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = defaults.max_tokens or DEFAULT_MAX_TOKENS
    more = {"max_tokens": 1 if score_only else max_tokens, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        more["prompt_logprobs"] = body.logprobs
    params, asked = checked_params(body, defaults, **more)
    count = None if body.logprobs is None else logprobs_count(body.logprobs)
    name = f"cmpl-{visit.id}"
    return _Call(body, prompts, params, asked.field, score_only, count, name, visit.model)


def split_prompts(prompt: object) -> list[Prompt]:
    """A string, token ids, or a list of either -> one prompt each. Raises ApiError 400."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(p) is int for p in prompt):
            return [prompt]
        if all(isinstance(p, str) or (isinstance(p, list) and p) for p in prompt):
            return list(prompt)
    raise ApiError(
        400,
        "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
        param="prompt",
    )


def check_sequences(num_prompts: int, n: object) -> None:
    """Raises ApiError 400 for more prompts, or sequences of them, than one request may have."""
    if num_prompts > MAX_PROMPTS:
        text = f"prompt holds {num_prompts} prompts, above the limit {MAX_PROMPTS}"
        raise ApiError(400, text, param="prompt")
    if isinstance(n, int) and n * num_prompts > MAX_N:
        text = f"n {n} of {num_prompts} prompts are more than {MAX_N} sequences"
        raise ApiError(400, text, param="n")


def _usage(call: _Call, outputs: Sequence[RequestOutput]) -> Usage:
    total = usage(outputs)
    return replace(total, completion_tokens=0) if call.score_only else total


class _Echo:
    """One choice's running text offset, and the prompt that goes out before its first text."""

    def __init__(self, call: _Call, output: RequestOutput, engine: AsyncLLM) -> None:
        self._call = call
        self._tokenizer = engine.tokenizer
        self._first = True
        self._offset = 0
        self._prompt = ""
        if call.body.echo:
            self._prompt = output.prompt or ""
            if output.prompt is None and engine.tokenizer is not None:
                self._prompt = engine.tokenizer.decode(
                    output.prompt_token_ids, skip_special_tokens=False
                )

    def choice(self, at: int, output: RequestOutput, new: CompletionOutput) -> CompletionChoice:
        """What is new of a choice (all of it, when not streamed), the echo first."""
        call, body = self._call, self._call.body
        text, ids = ("", []) if call.score_only else (new.text, new.token_ids)
        logprobs = None
        if call.num_logprobs is not None:
            positions: list[PositionLogprobs | None] = []
            if not call.score_only:
                positions += new.logprobs or []
            scored_ids = list(ids)
            if self._first and body.echo:
                positions = [*(output.prompt_logprobs or []), *positions]
                shown = output.prompt_token_ids if output.prompt_logprobs else []
                scored_ids = [*shown, *scored_ids]
            logprobs = self._logprobs(positions, scored_ids)
        if self._first:
            text = self._prompt + text
        made = CompletionChoice(
            index=at * call.params.n + new.index,
            text=text,
            logprobs=logprobs,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
        )
        if call.score_only and new.finish_reason is not None:
            made.finish_reason, made.stop_reason = "length", None
        if body.return_token_ids:
            made.token_ids = list(ids)
            made.prompt_token_ids = output.prompt_token_ids if self._first else UNSET
        if body.prompt_logprobs is not None and self._first:
            made.prompt_logprobs = prompt_logprobs_body(output.prompt_logprobs)
        self._first = False
        return made

    def _logprobs(
        self, positions: Sequence[PositionLogprobs | None], ids: list[int]
    ) -> CompletionLogprobs:
        call = self._call
        as_ids = bool(call.body.return_tokens_as_token_ids)
        made, self._offset = completion_logprobs(
            positions,
            ids,
            call.num_logprobs or 0,
            self._offset,
            self._text_of,
            as_ids,
        )
        return made

    def _text_of(self, token_id: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_text(token_id)


async def _chunks(
    call: _Call, streams: Sequence[RequestStream], engine: AsyncLLM
) -> AsyncGenerator[bytes]:
    ends, continuous = with_usage(call.body.stream_options, engine.config.server)
    latest: dict[int, RequestOutput] = {}
    echoes: dict[int, _Echo] = {}
    prompt_logprobs: dict[int, RequestOutput] = {}
    chunk = Completion(call.id, call.created, call.model, [])
    if ends and not continuous:
        chunk.usage = None
    async for news, done in merged(streams, call.constraint_field):
        events = []
        for at, output in news:
            latest[at] = output
            if output.prompt_logprobs is not None:
                prompt_logprobs[at] = output
            elif at in prompt_logprobs:  # delivered once; every choice of this prompt echoes it
                output.prompt_logprobs = prompt_logprobs[at].prompt_logprobs
            for new in output.outputs:
                index = at * call.params.n + new.index
                if index not in echoes:
                    echoes[index] = _Echo(call, output, engine)
                chunk.choices = [echoes[index].choice(at, output, new)]
                if continuous:
                    chunk.usage = usage_body(_usage(call, list(latest.values())))
                events.append(event(encode(chunk)))
        if done:
            if ends:
                chunk.choices = []
                chunk.usage = usage_body(_usage(call, list(latest.values())))
                events.append(event(encode(chunk)))
            events.append(DONE)
        yield b"".join(events)
