"""Chat messages as templates expect them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
SYSTEM = ("system", "developer")


class ChatTemplateError(ValueError):
    """The messages or the template cannot be rendered; one sentence for the client."""


def normalize_messages(messages: Sequence[Message], keep_parts: bool = False) -> list[Message]:
    """Messages as templates expect them; the argument is left as it is.

    Content that is null, missing or [] becomes "" (it would print as the word None); text parts are
    joined by newlines unless `keep_parts`; empty `tool_calls` are dropped; tool-call arguments,
    JSON text on the wire, become mappings; `function_call` and the role "function", their older
    names, become calls and results of tools. Raises ChatTemplateError naming the field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ChatTemplateError("messages must be a list of at least one message")
    made = [_message(m, i, keep_parts) for i, m in enumerate(messages)]
    return _with_ids(made) if any(m["role"] == "function" for m in made) else made


def _with_ids(messages: list[Message]) -> list[Message]:
    """Results of functions as results of the calls before them."""
    made: list[Message] = []
    call_id = ""
    for i, message in enumerate(messages):
        if message["role"] == "function":
            if not isinstance(message.get("name"), str):
                raise ChatTemplateError(f"messages[{i}].name must be the name of the function")
            message = {**message, "role": "tool", "tool_call_id": call_id or _call_id(i)}
        elif message.get("tool_calls"):
            call_id = str(message["tool_calls"][-1].get("id", _call_id(i)))
        made.append(message)
    return made


def _call_id(index: int) -> str:
    return f"{index:09d}"  # some templates want ids of 9 characters


def _message(message: Message, index: int, keep_parts: bool) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"{where} must be an object with a role")
    out = {k: v for k, v in message.items() if v is not None or k == "content"}
    out["content"] = _content(message.get("content"), f"{where}.content", keep_parts)
    calls, function = out.pop("tool_calls", None), out.pop("function_call", None)
    if function is not None and not calls:
        call = {"id": _call_id(index), "type": "function", "function": function}
        out["tool_calls"] = [_tool_call(call, where, "function_call")]
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ChatTemplateError(f"{where}.tool_calls must be a list")
        out["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return out


def _content(content: Any, where: str, keep_parts: bool) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ChatTemplateError(f"{where} must be text or a list of parts")
    parts: list[dict[str, str]] = []
    for i, part in enumerate(content):
        text = part if isinstance(part, str) else None
        if isinstance(part, Mapping):
            kind = part.get("type", "text")
            if kind not in ("text", "input_text", "output_text"):
                raise ChatTemplateError(f"{where}[{i}] has type {kind!r}; only text is supported")
            text = part.get("text")
        if not isinstance(text, str):
            raise ChatTemplateError(f"{where}[{i}] must be a text part with a text")
        parts.append({"type": "text", "text": text})
    return parts if keep_parts and parts else "\n".join(p["text"] for p in parts)


def _tool_call(call: Any, where: str, name: str = "function") -> dict[str, Any]:
    """`name` is what the client calls the function's object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatTemplateError(f"{where}.{name} must be an object with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (json.JSONDecodeError, RecursionError) as e:
            raise ChatTemplateError(f"{where}.{name}.arguments is not valid JSON") from e
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ChatTemplateError(f"{where}.{name}.arguments must be a JSON object")
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def for_template(message: Message, template: str) -> Message:
    """Roles and fields by the names that the template knows."""
    role = message["role"]
    if role == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role != "assistant" or not reasoning:
        return message
    made = {**message, "reasoning_content": reasoning}
    if "thinking" in template and not (message.get("content") and "tool_calls" in message):
        made.setdefault("thinking", reasoning)
    return made


def plainer_turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The same conversation for templates that take a system turn at the beginning only, or none:
    with all system turns merged into the leading one; so, with what two user turns then say in a
    row as one; and with the system's text at the head of the first user turn. Agents send system
    turns in the middle. Nothing for a conversation without system turns."""
    said = [m["content"] for m in messages if m["role"] in SYSTEM]
    if not said:
        return
    rest = [m for m in messages if m["role"] not in SYSTEM]
    system = [{"role": "system", "content": _together(said)}]
    yield [*system, *rest]
    joined = _user_turns_joined(rest)
    yield [*system, *joined]
    for i, message in enumerate(joined):
        if message["role"] == "user":
            both = _together([*said, message["content"]])
            yield [*joined[:i], {**message, "content": both}, *joined[i + 1 :]]
            return


def loses_system(messages: Sequence[Message], shown: str) -> bool:
    """Whether a prompt lacks what a system turn behind the leading ones says."""
    led = False
    for message in messages:
        if message["role"] not in SYSTEM:
            led = True
        elif led:
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            if any(text.strip() not in shown for text in texts):
                return True
    return False


def _user_turns_joined(messages: Sequence[Message]) -> list[Message]:
    made: list[Message] = []
    for message in messages:
        if made and message["role"] == "user" == made[-1]["role"]:
            content = _together([made[-1]["content"], message["content"]])
            made[-1] = {**made[-1], "content": content}
        else:
            made.append(message)
    return made


def _together(contents: Sequence[Any]) -> Any:
    """Contents one after the other: as text, or as parts if one of them has parts."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(content for content in contents if content)
    parts: list[dict[str, str]] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def with_null_content(message: Message) -> Message:
    """Calls without text beside them have null content, and arguments as JSON text."""
    if "tool_calls" not in message or message.get("content"):
        return message
    return as_text({**message, "content": None})


def with_calls_in_content(message: Message) -> Message:
    """Calls as hermes writes them, in the content."""
    if "tool_calls" not in message or not isinstance(message["content"], str):
        return message
    calls = [
        "<tool_call>\n"
        + _dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"]})
        + "\n</tool_call>"
        for c in message["tool_calls"]
    ]
    kept = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**kept, "content": "\n".join([*filter(None, [message["content"]]), *calls])}


def as_text(message: Message) -> Message:
    """Arguments of calls as JSON text."""
    calls = [
        {**c, "function": {**c["function"], "arguments": _dumps(c["function"]["arguments"])}}
        for c in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
