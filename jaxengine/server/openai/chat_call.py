"""A chat request, checked once from its first field to its last: what it asks of the engine, and
how its answer is told."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jaxengine.front.async_llm import AsyncLLM, off_loop
from jaxengine.sampling_params import SamplingParams
from jaxengine.server.answer.answer_plan import plan_answer
from jaxengine.server.answer.answers import Style, reads_answers
from jaxengine.server.answer.constraints import Asked
from jaxengine.server.answer.render import EFFORTS, render
from jaxengine.server.answer.tools import ToolChoice, tool_choice
from jaxengine.server.errors import ApiError
from jaxengine.server.openai import legacy_functions
from jaxengine.server.openai.protocol import (
    ChatBody,
    checked_params,
    with_usage,
)
from jaxengine.server.state import Visit
from jaxengine.text.reasoning import AnswerGate, Start
from jaxengine.validation import TOO_LONG, RequestError


@dataclass(frozen=True)
class ChatCall:
    """A checked request. What depends on its prompt is filled in by `with_prompt`."""

    body: ChatBody  # in terms of tools, also where it had functions
    params: SamplingParams
    asked: Asked  # the constraint, and the field that it came in by
    tools: ToolChoice
    echo: str  # text that goes out before the answer
    id: str
    model: str
    usage: tuple[bool, bool]  # of a stream: at its end, in each chunk
    legacy: bool  # asked with `functions`
    created: int = field(default_factory=lambda: int(time.time()))
    prompt: str = ""
    thinking: Start | None = None
    gate: Callable[[], AnswerGate] | None = None
    style: Style | None = None  # how the answer's text is taken apart; None: it is all content

    @property
    def constraint_name(self) -> str:
        """For errors: where what the engine enforces comes from."""
        return self.asked.field or "tools"

    def engine_prompt(self) -> dict[str, Any]:
        """As `AsyncLLM.add` takes it."""
        return {
            "prompt": self.prompt,
            "add_special_tokens": bool(self.body.add_special_tokens),
            "thinking": self.thinking,
            "gate": self.gate,
        }


async def chat_call(body: ChatBody, visit: Visit, prefix: str) -> ChatCall:
    """The request, checked, with its prompt; its id is `prefix` and the visit's. Raises ApiError,
    RequestError, ChatTemplateError."""
    call = await off_loop(visit.size, lambda: _parse(body, visit, prefix))
    return await _with_prompt(call, visit.engine)


def _parse(body: ChatBody, visit: Visit, prefix: str) -> ChatCall:
    engine = visit.engine
    body, legacy = legacy_functions.in_terms_of_tools(body)
    try:
        params, asked = checked_params(body, engine.default_params, **_lengths(body))
    except RequestError as error:
        raise as_written(error, body, Asked()) from None
    if body.reasoning_effort is not None and body.reasoning_effort not in EFFORTS:
        raise _bad(
            "reasoning_effort",
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {body.reasoning_effort!r}",
        )
    tools = tool_choice(body, engine.config.server)
    if tools.enforced and asked.constraint is not None:
        name = asked.field.split(".")[0]
        raise _bad("tool_choice", f"{name} and an enforced tool_choice exclude each other")
    return ChatCall(
        body,
        params,
        asked,
        tools,
        echo=_echo(body),
        id=f"{prefix}{visit.id}",
        model=visit.model,
        usage=with_usage(body.stream_options, engine.config.server),
        legacy=legacy,
    )


def _lengths(body: ChatBody) -> dict[str, Any]:
    """How much is wanted: max_tokens, and log-probabilities of each token."""
    if body.top_logprobs is not None and not body.logprobs:
        raise _bad("top_logprobs", "top_logprobs needs logprobs: true")
    max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, name = body.max_tokens, "max_tokens"
    if max_tokens is not None and not max_tokens >= 1:
        raise _bad(name, f"{name} must be at least 1, got {max_tokens}")
    found: dict[str, Any] = {"max_tokens": max_tokens}
    if body.logprobs:
        found["logprobs"] = 0 if body.top_logprobs is None else body.top_logprobs
    return found


def _echo(body: ChatBody) -> str:
    if not (body.echo and body.messages and body.messages[-1].get("role") == "assistant"):
        return ""
    content = body.messages[-1].get("content")
    return content if isinstance(content, str) else ""


async def _with_prompt(call: ChatCall, engine: AsyncLLM) -> ChatCall:
    """Render the conversation, and settle what depends on it: constraint and style."""
    text = await render(call.body, engine, call.tools.shown)
    if not reads_answers(engine.config.server, call.tools):
        return replace(call, prompt=text)
    plan = await off_loop(
        500 * len(call.tools.tools),
        lambda: plan_answer(call.body, call.params, call.asked, call.tools, text, engine),
    )
    return replace(
        call,
        prompt=plan.prompt,
        params=plan.params,
        thinking=plan.thinking,
        gate=plan.gate,
        style=plan.style,
    )


def as_written(error: RequestError, body: ChatBody, asked: Asked) -> RequestError:
    """In the names that the client wrote: messages, top_logprobs."""
    if error.code == TOO_LONG:
        return RequestError("messages", error.message, TOO_LONG)
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if error.field == "structured_outputs" and not asked.field:
        text = re.sub(r"structured_outputs(\.\w+)?", "the schema of tools", error.message)
        return RequestError("tools", text)
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    name, text = names.get(error.field, error.field), error.message
    return RequestError(name, text if name in text else f"{name}: {text}")


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param)
