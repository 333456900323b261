"""Request bodies. Types are strict (no "5" for 5); ranges are checked by frontend.validation, what
is known but not served by server.fields.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from jaxengine.config import ServerConfig
from jaxengine.sampling_params import SamplingParams
from jaxengine.server.answer.constraints import Asked, constraint_of
from jaxengine.server.errors import ApiError
from jaxengine.server.fields import COMPLETION, check_extra

Number = int | float | None  # JSON's 1e3 is a float; validation takes integral ones


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(BaseModel):
    """What both kinds of completion share; vLLM's extra sampling fields included."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    n: Number = None
    temperature: Number = None
    top_p: Number = None
    top_k: Number = None
    min_p: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    seed: Number = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: Number = None
    min_tokens: Number = None
    logit_bias: dict[str, int | float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Number = None
    truncate_prompt_tokens: Number = None
    truncation_side: str | None = None
    thinking_token_budget: Number = None
    stream_interval: Number = None
    priority: Number = None
    cache_salt: str | None = None
    response_format: Any = None  # these six: see server.constraints
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    data_parallel_rank: int | None = None


# The fields that are sampling parameters as they stand; the constraint has many forms, and what
# max_tokens may be differs by API.
SAMPLING = tuple(
    name
    for name in SamplingBody.model_fields
    if name in SamplingParams.__struct_fields__ and name not in ("max_tokens", "structured_outputs")
)


class CompletionBody(SamplingBody):
    prompt: str | list[Any]
    logprobs: Number = None


class ChatBody(SamplingBody):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: Number = None
    max_completion_tokens: Number = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None  # this and the next: see server.tools
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None  # these two: see server.legacy_functions
    function_call: Any = None
    include_reasoning: bool | None = None
    return_prompt_text: bool | None = None
    reasoning_effort: str | None = None


class TokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: list[int]


def _check_fields(body: SamplingBody) -> None:
    taken = ("best_of",) if (body.model_extra or {}).get("best_of") == (body.n or 1) else ()
    check_extra(body.model_extra, COMPLETION, taken)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def with_usage(options: StreamOptions | None, config: ServerConfig) -> tuple[bool, bool]:
    """Whether a stream ends with the usage, and whether each of its chunks has it."""
    if config.enable_force_include_usage:
        return True, True
    asked = options is not None and bool(options.include_usage)
    return asked, asked and bool(options and options.continuous_usage_stats)


def checked_params(
    body: SamplingBody, defaults: SamplingParams, **more: Any
) -> tuple[SamplingParams, Asked]:
    """The body's values over `defaults` (the model's), with `more` on top, and its constraint with
    the field it came in by. What depends on the model is not validated yet. Raises ApiError 400 for
    a field that is known but not served, or a malformed constraint; RequestError for a value that
    no model could be asked for."""
    _check_fields(body)
    asked = constraint_of(body)
    given = {name: getattr(body, name) for name in SAMPLING}
    chosen = {name: getattr(defaults, name) for name in SamplingParams.__struct_fields__}
    chosen |= {name: value for name, value in given.items() if value is not None}
    chosen["structured_outputs"] = asked.constraint
    return SamplingParams(**(chosen | more)), asked


def logprobs_count(value: int | float) -> int:
    """How many alternatives to show; -1 is all there are. What is no count shows none: the
    validation that follows refuses it."""
    if isinstance(value, float) and not value.is_integer():
        return 0
    return int(value) if value >= 0 else 1 << 30
