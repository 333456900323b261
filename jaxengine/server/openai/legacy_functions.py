"""`functions` and `function_call`, the older names of `tools` and `tool_choice`: one call an answer
at most, told as `function_call`. The request becomes one with tools; the answer is renamed back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import UNSET

from jaxengine.server.errors import ApiError
from jaxengine.server.openai.bodies import Delta, FunctionCall, Message
from jaxengine.server.openai.protocol import ChatBody
from jaxengine.validation import RequestError


def uses_functions(body: ChatBody) -> bool:
    return bool(body.functions) or body.function_call not in (None, "none", "auto")


def in_terms_of_tools(body: ChatBody) -> tuple[ChatBody, bool]:
    """The same request without functions, and whether it had any. Raises ApiError 400."""
    if not uses_functions(body):
        return body, False
    if body.tools or body.tool_choice is not None:
        raise _bad("functions", "functions and tools exclude each other")
    if not body.functions:
        raise _bad("function_call", "function_call needs functions")
    asked = body.function_call
    if isinstance(asked, Mapping):
        asked = {"type": "function", "function": {"name": asked.get("name")}}
    elif asked not in (None, "none", "auto"):
        raise _bad(
            "function_call",
            f'function_call must be "none", "auto" or {{"name": ...}}, got {asked!r:.60}',
        )
    tools = [{"type": "function", "function": function} for function in body.functions]
    changes: dict[str, Any] = {"tools": tools, "tool_choice": asked, "parallel_tool_calls": False}
    return body.model_copy(update=changes), True


@contextmanager
def errors_as_asked(body: ChatBody) -> Iterator[None]:
    """Errors about tools become errors about functions where the body has these."""
    used = uses_functions(body)
    try:
        yield
    except ApiError as error:
        if not used or error.param not in _NAMES:
            raise
        name = _NAMES[error.param]
        raise ApiError(error.status, _told(error.message), param=name, code=error.code) from None
    except RequestError as error:
        if not used or error.field not in _NAMES:
            raise
        raise RequestError(_NAMES[error.field], _told(error.message), error.code) from None


def message_with_function(message: Message) -> Message:
    """The call as `function_call`."""
    for call in message.tool_calls[:1]:
        message.function_call = call.function
    message.tool_calls = []
    return message


def delta_with_function(delta: Delta) -> Delta:
    """The pieces of the call as `function_call`."""
    calls, delta.tool_calls = delta.tool_calls, []
    for call in calls:
        if delta.function_call is None:
            delta.function_call = FunctionCall()
        if call.function.name is not UNSET:
            delta.function_call.name = call.function.name
        delta.function_call.arguments += call.function.arguments
    return delta


def finish_reason(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason


_NAMES = {"tools": "functions", "tool_choice": "function_call"}


def _told(message: str) -> str:
    message = re.sub(r"\btools\[(\d+)\](\.function)?", r"functions[\1]", message)
    message = message.replace("tool_choice.function.name", "function_call.name")
    return re.sub(r"\btool_choice\b", "function_call", re.sub(r"\btools\b", "functions", message))


def _bad(field: str, message: str) -> ApiError:
    return ApiError(400, message, param=field)
