"""Tools in words, for chat templates that know nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_FORMS = {
    "llama3_json": '{"name": <function-name>, "parameters": <args-json-object>}',
    "mistral": '[TOOL_CALLS][{"name": <function-name>, "arguments": <args-json-object>}]',
    "pythonic": "[<function-name>(<argument-name>=<value>, ...)]",
}
_TAGGED = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'


def describe(tools: Sequence[Mapping[str, Any]], parser: str | None) -> str:
    """A text for the system message: the functions, and how to call them so that the tool parser
    understands it."""
    listed = "\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools)
    form = _FORMS.get(parser or "", _TAGGED)
    return f"You can call these functions:\n{listed}\n\nTo call one, answer with:\n{form}"


def with_description(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], parser: str | None
) -> list[Mapping[str, Any]]:
    """The messages with the tools described in the system message, which is made if needed."""
    text = describe(tools, parser)
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    content = first.get("content")
    if isinstance(content, list):
        merged: Any = [*content, {"type": "text", "text": text}]
    else:
        merged = f"{content}\n\n{text}" if content else text
    return [{**first, "content": merged}, *messages[1:]]
