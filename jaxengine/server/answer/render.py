"""The conversation of a request as prompt text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxengine.config import template_kwargs
from jaxengine.front.async_llm import AsyncLLM, off_loop
from jaxengine.front.model_files import UNKNOWN
from jaxengine.server.errors import ApiError
from jaxengine.server.openai.protocol import ChatBody, TokenizeBody
from jaxengine.server.state import LONGEST
from jaxengine.text.chat_template import (
    ChatTemplateError,
    pick_template,
    render_conversation,
    takes_tools,
)
from jaxengine.text.tools.describe import with_description
from jaxengine.validation import check_text

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_RESERVED = {
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("bos_token", "eos_token", "template", "template_name"),
}


async def render(
    body: ChatBody | TokenizeBody, engine: AsyncLLM, tools: Sequence[dict[str, Any]] = ()
) -> str:
    """The conversation as text, by the model's template. `tools`, if any, are given to it; where
    it has no place for them, they are described in the system message. Raises ApiError 400,
    ChatTemplateError, RequestError."""
    messages = body.messages
    if not messages:
        raise ApiError(400, "messages must not be empty", param="messages")
    most = LONGEST * engine.ready.max_model_len  # each is a token at least
    if len(messages) > most:
        text = f"messages has {len(messages)} entries, above the limit {most}"
        raise ApiError(400, text, param="messages")
    template = engine.chat_template
    if body.chat_template is not None:
        if not engine.config.model.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template in requests is refused (--trust-request-chat-template allows it)",
                param="chat_template",
            )
        template = body.chat_template
    tokenizer = engine.tokenizer
    if template is None or tokenizer is None:
        raise ApiError(400, "the model has no chat template; use /v1/completions", param="messages")
    continues = bool(body.continue_final_message)
    generation_prompt = body.add_generation_prompt
    if generation_prompt and continues:
        raise ApiError(
            400,
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    if generation_prompt is None:
        generation_prompt = not continues
    options = _variables(body, engine)
    parser = engine.config.server.tool_call_parser

    def rendered(given: Sequence[Any], shown: Sequence[dict[str, Any]]) -> str:
        return render_conversation(
            template,
            given,
            tools=list(shown) or None,
            add_generation_prompt=generation_prompt,
            continue_final_message=continues,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **options,
        )

    def work() -> str:
        return check_text("messages", made())

    def made() -> str:
        if not tools:
            return rendered(messages, ())
        if not takes_tools(pick_template(template, tools=tools)):
            return rendered(with_description(messages, tools, parser), tools)
        try:
            return rendered(messages, tools)
        except ChatTemplateError:  # some templates want what is optional in a tool
            whole = [_whole(tool) for tool in tools]
            if whole == list(tools):
                raise
            return rendered(messages, whole)

    size = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str | list))
    size += 100 * len(messages) + 500 * len(tools)
    if body.chat_template is not None:  # nobody knows what it does
        size = max(size, UNKNOWN)
    return await off_loop(size, work)


def _whole(tool: dict[str, Any]) -> dict[str, Any]:
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    given = {k: v for k, v in tool["function"].items() if v is not None}
    return {**tool, "function": {**empty, **given}}


def _variables(body: ChatBody | TokenizeBody, engine: AsyncLLM) -> dict[str, Any]:
    """What else the template is given; the request's own variables come last."""
    asked = body.chat_template_kwargs or {}
    reserved = _RESERVED & set(asked)
    if reserved:
        name = sorted(reserved)[0]
        raise ApiError(
            400, f"chat_template_kwargs must not hold {name}", param="chat_template_kwargs"
        )
    options = template_kwargs(engine.config.server.default_chat_template_kwargs)
    options = {k: v for k, v in options.items() if k not in _RESERVED}
    if isinstance(body, ChatBody):
        effort = body.reasoning_effort
        if effort is not None:  # over the server's defaults: the request says it
            options["enable_thinking"] = effort != "none"
        if effort not in (None, "none"):
            options["reasoning_effort"] = effort
        if body.documents is not None:
            options["documents"] = body.documents
    return options | asked
