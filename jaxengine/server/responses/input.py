"""Items of the Responses API as chat messages, both ways."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.server.errors import ApiError

log = logging.getLogger(__name__)

Message = dict[str, Any]
Item = Mapping[str, Any]

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# Calls of other tools than functions that agents carry out themselves, and their results.
_OTHER_CALLS = ("custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# What the hosted API has carried out: its results are in the text that follows.
_HOSTED = (
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "web_search_call",
)
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def to_messages(items: str | Sequence[Any], earlier: Sequence[Message] = ()) -> list[Message]:
    """The messages that `items` stand for, to follow `earlier` ones. Reasoning, text and calls of
    one turn become one assistant message. Raises ApiError 400 naming the item."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not items:
        raise ApiError(400, "input must not be empty", param="input")
    messages: list[Message] = []
    names = {
        call["id"]: call["function"]["name"]
        for message in earlier
        for call in message.get("tool_calls", ())
    }
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise _bad(f"{where} must be an object")
        kind = item.get("type") or "message"
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            message = _assistant(messages, "content", "tool_calls")
            earlier_text = message.get("reasoning_content", "")
            message["reasoning_content"] = earlier_text + _reasoning(item, where)
        elif kind == "function_call":
            call = _call(item, where)
            names[call["id"]] = call["function"]["name"]
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif kind in _OTHER_CALLS:
            call = _other_call(item, kind, where)
            names[call["id"]] = call["function"]["name"]
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif kind in _HOSTED:
            log.warning("%s of type %r is left out: it was carried out elsewhere", where, kind)
        elif kind in _OUTPUTS:
            call_id = _text(item, "call_id", where)
            if call_id not in names:
                raise _bad(f"{where}.call_id {call_id!r} is not the id of a function_call before")
            content = _content(item.get("output"), f"{where}.output")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call_id,
                    "name": names[call_id],
                    "content": content,
                }
            )
        else:
            raise _bad(f"{where}.type {kind!r} is not supported", "unsupported")
    return messages


def is_reference(item: Any) -> bool:
    """Whether an item only names another one."""
    if not isinstance(item, Mapping) or "id" not in item:
        return False
    return item.get("type") == "item_reference" or (
        item.get("type") is None and not set(item) - {"id", "type"}
    )


def with_instructions(messages: Sequence[Message], instructions: str | None) -> list[Message]:
    """The conversation with the instructions before it: one system message, as most templates take
    no more."""
    rest = list(messages)
    parts = [] if not instructions else [instructions]
    while rest and rest[0]["role"] == "system":
        parts.append(rest.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(parts)}, *rest] if parts else rest


def droppable(messages: Sequence[Message]) -> list[int]:
    """Where a conversation may be cut to make it shorter: numbers of messages to drop behind the
    leading system message, least first. What stays does not begin with a tool's answer, and the
    last message stays."""
    first = 1 if messages and messages[0]["role"] == "system" else 0
    cuts = range(len(messages) - first)
    return [n for n in cuts if messages[first + n]["role"] != "tool"]


def without(messages: Sequence[Message], count: int) -> list[Message]:
    """The conversation less its first `count` messages behind the leading system message."""
    first = 1 if messages and messages[0]["role"] == "system" else 0
    return [*messages[:first], *messages[first + count :]]


def _bad(message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param="input", code=code)


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _bad(f"{where}.{name} must be a string")
    return value


def _assistant(messages: list[Message], *taken: str) -> Message:
    """The assistant message being put together; a new one if it has one of the fields `taken`."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(last.get(name) for name in taken):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_message(messages: list[Message], item: Item, where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise _bad(f"{where}.role must be one of {known}, got {role!r}")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        _assistant(messages, "content")["content"] = content
    else:
        messages.append({"role": _ROLES[role], "content": content})


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _bad(f"{where} must be a string or a list of parts")
    texts = []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        if not isinstance(part, Mapping):
            raise _bad(f"{at} must be an object")
        kind = part.get("type")
        if kind not in (*_TEXTS, "refusal"):
            raise _bad(f"{at}.type {kind!r} is not supported, only text is", "unsupported")
        texts.append(_text(part, "refusal" if kind == "refusal" else "text", at))
    return "\n".join(texts)


def _reasoning(item: Item, where: str) -> str:
    """The reasoning itself where the item has it, else its summary."""
    for name in ("content", "summary"):
        if item.get(name):
            return _content(item[name], f"{where}.{name}")
    return ""


def _other_call(item: Item, kind: str, where: str) -> dict[str, Any]:
    """A call of a custom tool, which takes one text, or of a shell, as the call of a function."""
    if kind == "custom_tool_call":
        name, arguments = _text(item, "name", where), {"input": _text(item, "input", where)}
    else:
        action = item.get("action")
        if not isinstance(action, Mapping):
            raise _bad(f"{where}.action must be an object")
        name, arguments = "local_shell", dict(action)
    call_id = _text(item, "call_id", where)
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def _call(item: Item, where: str) -> dict[str, Any]:
    name, arguments = _text(item, "name", where), _text(item, "arguments", where)
    return {
        "id": _text(item, "call_id", where),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
