"""The body of POST /v1/messages, and the chat request that it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from jaxengine.server.answer.pieces import SAMPLING_FIELDS, sampling_extras
from jaxengine.server.errors import ApiError
from jaxengine.server.fields import MESSAGES, check_extra, note_left_out
from jaxengine.server.openai.protocol import Number

# the chat's field -> what the client wrote
FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "prompt": "messages",
    "messages": "messages",
}

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(BaseModel):
    """What both routes take."""

    model_config = ConfigDict(strict=True, extra="allow")

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # its older place


class MessagesBody(CountBody):
    max_tokens: int | float
    temperature: Number = None
    top_p: Number = None
    top_k: Number = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stream: bool | None = None


def chat_fields(body: CountBody) -> dict[str, Any]:
    """The fields of the chat request, but for how it is streamed. Raises ApiError 400."""
    extra = body.model_extra or {}
    check_extra(extra, MESSAGES, (*SAMPLING_FIELDS, "context_management"))
    if "context_management" in extra:
        _check_edits(extra["context_management"])
    messages = to_messages(body.messages, body.system)
    fields = sampling_extras(body.model_extra)
    fields |= {
        "model": body.model,
        "messages": messages,
        "response_format": _response_format(body),
        "reasoning_effort": (body.output_config or {}).get("effort"),
    }
    if body.thinking is not None:
        given = fields.get("chat_template_kwargs")
        if given is None or isinstance(given, dict):  # else it is refused with the other fields
            fields["chat_template_kwargs"] = (given or {}) | _thinking(body.thinking)
        if body.thinking.get("type") == "enabled" and "budget_tokens" in body.thinking:
            fields.setdefault("thinking_token_budget", body.thinking["budget_tokens"])
    last = body.messages[-1] if body.messages else {}
    if last.get("role") == "assistant" and "tool_calls" not in messages[-1]:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    tools, left_out = _tools(body.tools or ())
    if tools or left_out:
        names = [tool["function"]["name"] for tool in tools]
        choice, parallel = _choice(body.tool_choice, names, left_out)
        if tools:
            fields |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    elif body.tool_choice is not None and body.tool_choice.get("type") not in ("auto", "none"):
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "user": _user(body.metadata),
        }
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
    return fields


def to_messages(
    turns: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Chat messages. The tool results of a user's turn come before its text. Raises ApiError 400
    naming the block."""
    messages: list[dict[str, Any]] = []
    if system:
        text = _without_header(system)
        if text:
            messages.append({"role": "system", "content": text})
    names: dict[str, str] = {}
    for i, turn in enumerate(turns):
        where, role, content = f"messages[{i}]", turn.get("role"), turn.get("content")
        if role not in ("user", "assistant", "system"):
            raise _bad(f"{where}.role must be user or assistant, got {role!r}")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise _bad(f"{where}.content must be a string or a list of blocks")
        elif role == "assistant":
            messages.append(_assistant(content, f"{where}.content", names))
        else:
            messages += _user_turn(role, content, f"{where}.content", names)
    return messages


# Claude Code's first line, another one in every request: with it no prompt would be found in the
# prefix cache. It says nothing to the model.
_VOLATILE = "x-anthropic-billing-header:"


def _without_header(system: str | Sequence[Mapping[str, Any]]) -> str:
    """The system prompt less the client's billing header, a block or the first line of it."""
    if isinstance(system, str):
        while system.lstrip().startswith(_VOLATILE):
            system = system.lstrip().partition("\n")[2]
        return system
    blocks = list(system)
    while blocks and isinstance(blocks[0], Mapping) and isinstance(blocks[0].get("text"), str):
        rest = _without_header(blocks[0]["text"])
        if rest == blocks[0]["text"]:
            break
        blocks = [{**blocks[0], "text": rest}, *blocks[1:]] if rest.strip() else blocks[1:]
    return _texts(blocks, "system")


def _bad(message: str, field: str = "messages") -> ApiError:
    return ApiError(400, message, param=field)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _bad(f"{where}.{name} must be a string")
    return value


def _texts(blocks: Sequence[Any], where: str) -> str:
    """The text of blocks that may be nothing else."""
    texts = []
    for i, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise _bad(f"{where}[{i}].type {kind!r} is not supported here, only 'text' is")
        texts.append(_string(block, "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _assistant(blocks: Sequence[Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        at, kind = f"{where}[{i}]", block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(_string(block, "text", at))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif kind == "redacted_thinking":
            continue  # of the hosted API, which alone can read it
        elif kind == "tool_use":
            name, call_id = _string(block, "name", at), _string(block, "id", at)
            if not isinstance(block.get("input"), Mapping):
                raise _bad(f"{at}.input must be an object")
            names[call_id] = name
            arguments = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            raise _bad(f"{at}.type {kind!r} is not supported in an assistant's message")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_turn(
    role: str, blocks: Sequence[Any], where: str, names: Mapping[str, str]
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        at, kind = f"{where}[{i}]", block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(_string(block, "text", at))
        elif kind == "tool_result" and role == "user":
            call_id, content = _string(block, "tool_use_id", at), block.get("content", "")
            if call_id not in names:
                raise _bad(f"{at}.tool_use_id {call_id!r} is not the id of a tool_use before")
            if isinstance(content, list):
                content = _texts(content, f"{at}.content")
            elif not isinstance(content, str):
                raise _bad(f"{at}.content must be a string or a list of blocks")
            if block.get("is_error"):
                content = f"Error: {content}"
            message = {"role": "tool", "tool_call_id": call_id, "content": content}
            results.append({**message, "name": names[call_id]})
        else:
            raise _bad(f"{at}.type {kind!r} is not supported in a {role}'s message")
    if texts or not results:
        results.append({"role": role, "content": "\n".join(texts)})
    return results


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The tools that the model may call, and the names of those left out: what Anthropic's own
    servers carry out (web_search_20250305 and its like) nobody carries out here."""
    tools: list[dict[str, Any]] = []
    left_out = []
    for i, tool in enumerate(given):
        where, kind = f"tools[{i}]", tool.get("type")
        if kind in (None, "custom"):
            tools.append(_tool(tool, where))
        elif isinstance(kind, str):
            note_left_out(where, kind)
            left_out.append(str(tool.get("name", kind)))
        else:
            raise _bad(f"{where}.type must be a string, got {kind!r}", "tools")
    return tools, left_out


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise _bad(f"{where}.name must be a non-empty string", "tools")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise _bad(f"{where}.input_schema must be an object", "tools")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _choice(
    choice: Mapping[str, Any] | None, names: Sequence[str], left_out: Sequence[str]
) -> tuple[Any, bool | None]:
    """The chat's tool_choice and parallel_tool_calls."""
    field = "tool_choice"
    if choice is None:
        return "auto", None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    kind = choice.get("type")
    if kind in ("any", "tool") and not names:
        raise _bad(f"{field} needs a tool, and {left_out[0]!r} cannot be called here", field)
    if kind == "tool" and choice.get("name") in left_out:
        raise _bad(f"{field}.name {choice['name']!r} cannot be called here", field)
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind], parallel
    if kind != "tool":
        raise _bad(f"{field}.type must be auto, any, tool or none, got {kind!r}", field)
    if choice.get("name") not in names:
        raise _bad(f"{field}.name {choice.get('name')!r} is not among the tools", field)
    return {"type": "function", "function": {"name": choice["name"]}}, parallel


def _check_edits(asked: Any) -> None:
    """Nothing is ever cleared from a conversation: only edits that keep all of it are taken."""
    edits = (asked or {}).get("edits") if isinstance(asked, Mapping | None) else asked
    if not isinstance(edits, list | None) or not all(
        isinstance(e, Mapping) and e.get("keep") == "all" for e in edits or ()
    ):
        raise _bad("context_management is not supported", "context_management")


def _thinking(thinking: Mapping[str, Any]) -> dict[str, Any]:
    """Templates that can think have a switch for it."""
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        text = f"thinking.type must be enabled, adaptive or disabled, got {kind!r}"
        raise _bad(text, "thinking")
    return {"enable_thinking": kind != "disabled"}


def _response_format(body: CountBody) -> dict[str, Any] | None:
    asked = (body.output_config or {}).get("format") or body.output_format
    if asked is None:
        return None
    if not isinstance(asked, Mapping) or asked.get("type") != "json_schema":
        raise _bad("output_config.format.type must be json_schema", "output_config")
    if not isinstance(asked.get("schema"), Mapping):
        raise _bad("output_config.format.schema must be an object", "output_config")
    schema = {"name": "answer", "schema": asked["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _user(metadata: Mapping[str, Any] | None) -> str | None:
    user = (metadata or {}).get("user_id")
    if user is not None and not isinstance(user, str):
        raise _bad("metadata.user_id must be a string", "metadata")
    return user
