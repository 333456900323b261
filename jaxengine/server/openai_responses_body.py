"""POST /v1/responses: its fields, what is refused, and the chat request that it stands for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from jaxengine.server.errors import ApiError
from jaxengine.server.pieces import SAMPLING_FIELDS, sampling_extras
from jaxengine.server.protocol import Number

log = logging.getLogger(__name__)

# field -> values that ask for nothing
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "prompt": (None,),
    "conversation": (None,),
    "context_management": (None, []),
    "moderation": (None,),
}
_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
# the chat's field -> what the client wrote
FIELD_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}


class ResponsesBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Number = None
    temperature: Number = None
    top_p: Number = None
    top_logprobs: Number = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _INCLUDES[0] in (self.include or ())


def check_body(body: ResponsesBody) -> None:
    """Refuse what is known but not supported (ApiError 400 naming it); log what is not known."""
    for name, value in (body.model_extra or {}).items():
        if name in _UNSUPPORTED:
            if value not in _UNSUPPORTED[name]:
                raise _refused(name, f"{name} is not supported")
        elif name not in SAMPLING_FIELDS:
            log.debug("field %r is not known and ignored", name)
    for i, name in enumerate(body.include or ()):
        if name not in _INCLUDES:
            raise _refused("include", f"include[{i}] {name!r} is not supported")
    if len(body.metadata or {}) > 16:
        raise ApiError(400, "metadata may hold at most 16 pairs", param="metadata")
    for key, value in (body.metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            text = "metadata keys may have at most 64 characters, values at most 512"
            raise ApiError(400, text, param="metadata")
    if body.background and not body.stored:
        raise ApiError(400, "background needs store: true", param="background")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def chat_fields(body: ResponsesBody, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of the chat request, but for how it is streamed. Raises ApiError 400."""
    fields = sampling_extras(body.model_extra)
    fields |= {
        "messages": list(messages),
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "user": body.user,
        "response_format": _response_format(body.text),
        "reasoning_effort": _effort(body.reasoning),
    }
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    tools, choice = _choice(tools, body.tool_choice)
    if tools:
        fields |= {
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": body.parallel_tool_calls,
        }
    return fields


def _refused(field: str, message: str) -> ApiError:
    return ApiError(400, message, param=field, code="unsupported")


def _response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    text = text or {}
    if text.get("verbosity") not in (None, "medium"):
        raise _refused("text", "text.verbosity is not supported")
    asked = text.get("format")
    if asked is None:
        return None
    if not isinstance(asked, Mapping):
        raise ApiError(400, "text.format must be an object", param="text.format")
    kind = asked.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        text_ = f"text.format.type must be text, json_object or json_schema, got {kind!r}"
        raise ApiError(400, text_, param="text.format")
    if not isinstance(asked.get("schema"), Mapping):
        raise ApiError(400, "text.format.schema must be an object", param="text.format")
    schema = {k: asked[k] for k in ("name", "description", "schema", "strict") if k in asked}
    return {"type": "json_schema", "json_schema": schema}


def _effort(reasoning: Mapping[str, Any] | None) -> Any:
    reasoning = reasoning or {}
    for name in ("summary", "generate_summary"):
        # reasoning is shown as it is; "auto" leaves the choice to the server
        if reasoning.get(name) not in (None, "auto", "none"):
            raise _refused("reasoning", f"reasoning.{name} {reasoning[name]!r} is not supported")
    return reasoning.get("effort")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        given = tool.get("type")
        raise _refused("tools", f"{where}.type {given!r} is not supported, only 'function' is")
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise ApiError(400, f"{where}.name must be a non-empty string", param="tools")
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {k: tool[k] for k in names if tool.get(k) is not None},
    }


def _choice(
    tools: list[dict[str, Any]], choice: str | Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, and the chat's tool_choice."""
    field = "tool_choice"
    names = [tool["function"]["name"] for tool in tools]
    if choice is None or choice in ("none", "auto"):
        return tools, choice
    if choice == "required":
        if not tools:
            raise ApiError(400, "tool_choice 'required' needs tools", param=field)
        return tools, choice
    if isinstance(choice, str):
        text = f"tool_choice must be none, auto, required or an object, got {choice!r}"
        raise ApiError(400, text, param=field)
    kind = choice.get("type")
    if kind == "function":
        name = choice.get("name")
        if name not in names:
            raise ApiError(400, f"tool_choice.name {name!r} is not among the tools", param=field)
        return tools, {"type": "function", "function": {"name": name}}
    if kind != "allowed_tools":
        raise _refused(field, f"tool_choice.type {kind!r} is not supported")
    mode, asked = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise ApiError(400, f"tool_choice.mode must be auto or required, got {mode!r}", param=field)
    if not isinstance(asked, list) or not asked or not all(isinstance(t, Mapping) for t in asked):
        raise ApiError(400, "tool_choice.tools must be a list of tools", param=field)
    allowed = [t.get("name") for t in asked]
    missing = [name for name in allowed if name not in names]
    if missing:
        text = f"tool_choice.tools names {missing[0]!r}, which is not among the tools"
        raise ApiError(400, text, param=field)
    return [t for t in tools if t["function"]["name"] in allowed], mode
