"""POST /v1/responses: its fields, what is refused, and the chat request that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from jaxengine.server.answer.pieces import SAMPLING_FIELDS, sampling_extras
from jaxengine.server.errors import ApiError
from jaxengine.server.fields import RESPONSES, check_extra, note_left_out
from jaxengine.server.openai.protocol import Number

_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
# the chat's field -> what the client wrote
FIELD_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
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
    """Refuse what is known but not supported (ApiError 400 naming it)."""
    check_extra(body.model_extra, RESPONSES, SAMPLING_FIELDS)
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
    tools, choice = _choice(_functions(body.tools or ()), body.tool_choice)
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
    if text.get("verbosity") not in (None, "low", "medium", "high"):  # a hint, left out
        known = "low, medium or high"
        raise ApiError(400, f"text.verbosity must be {known}", param="text")
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
        # a hint: reasoning is shown as it is, and that has all of it
        if reasoning.get(name) not in (None, "auto", "concise", "detailed", "none"):
            text = f"reasoning.{name} must be auto, concise or detailed, got {reasoning[name]!r}"
            raise ApiError(400, text, param="reasoning")
    return reasoning.get("effort")


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools that are functions, as chat completions have them. Others (web_search, local_shell,
    namespace, custom ...) are left out: agents list all they know in every request."""
    made = []
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "function":
            made.append(_tool(tool, f"tools[{i}]"))
        elif isinstance(kind, str):
            note_left_out(f"tools[{i}]", kind)
        else:
            raise ApiError(400, f"tools[{i}].type must be a string, got {kind!r}", param="tools")
    return made


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
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
    # those that are left out of the tools are left out here too
    allowed = [t.get("name") for t in asked if t.get("type", "function") == "function"]
    if not allowed and mode == "required":
        raise _refused(field, "tool_choice requires a tool, and none of the tools is a function")
    missing = [name for name in allowed if name not in names]
    if missing:
        text = f"tool_choice.tools names {missing[0]!r}, which is not among the tools"
        raise ApiError(400, text, param=field)
    return [t for t in tools if t["function"]["name"] in allowed], mode
