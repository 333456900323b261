"""The tools of a request and which of them the model may or must call. Everything malformed is
ApiError 400 with the field's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxengine.config import ServerConfig
from jaxengine.server.errors import ApiError
from jaxengine.server.openai.protocol import ChatBody

Mode = Literal["none", "auto", "required", "named"]
Tool = dict[str, Any]

MAX_TOOLS = 8192
_NAME = re.compile(r"[A-Za-z0-9_.:/\-]{1,256}")
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


@dataclass(frozen=True)
class ToolChoice:
    """`tools` may be called; `shown` are in the prompt. With mode "named" there is one in `tools`:
    it must be called."""

    mode: Mode = "none"
    tools: tuple[Tool, ...] = ()
    shown: tuple[Tool, ...] = ()
    parallel: bool = True  # more than one call in an answer

    @property
    def enforced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def strict(self) -> bool:
        """Some tool asks for arguments that follow its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)


def tool_choice(body: ChatBody, config: ServerConfig) -> ToolChoice:
    """Raises ApiError 400, for `auto` too where the server was not started for it."""
    tools = check_tools(body.tools)
    asked = body.tool_choice
    if asked is None:
        asked = "auto" if tools else "none"
    mode, chosen = _mode(asked, tools)
    if not tools and mode in ("required", "named"):
        raise _bad("tool_choice", "tool_choice needs tools")
    if not tools:
        return ToolChoice()
    if mode == "auto" and not config.enable_auto_tool_choice:
        raise _bad(
            "tool_choice",
            'tool_choice "auto" needs a server with --enable-auto-tool-choice and '
            "--tool-call-parser",
        )
    hidden = mode == "none" and config.exclude_tools_when_tool_choice_none
    shown = () if hidden else tools
    return ToolChoice(mode, chosen, shown, body.parallel_tool_calls is not False)


def check_tools(tools: list[Any] | None) -> tuple[Tool, ...]:
    """The tools of a body, each with a function's name and a well-formed schema."""
    if not tools:
        return ()
    if len(tools) > MAX_TOOLS:
        raise _bad("tools", f"tools has {len(tools)} entries, above the limit {MAX_TOOLS}")
    checked = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    seen: set[str] = set()
    for i, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in seen:
            raise _bad("tools", f"tools[{i}].function.name {name!r} is there twice")
        seen.add(name)
    return checked


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise _bad("tools", f"{where} must be an object")
    if tool.get("type", "function") != "function":
        raise _bad("tools", f'{where}.type must be "function", got {_show(tool.get("type"))}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _bad("tools", f"{where}.function must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(
            "tools",
            f"{where}.function.name must be 1 to 256 letters, digits or any of _-.:/, "
            f"got {_show(name)}",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise _bad("tools", f"{where}.function.description must be a string")
    if not isinstance(function.get("strict"), bool | None):
        raise _bad("tools", f"{where}.function.strict must be true or false")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _bad("tools", f"{where}.function.parameters must be a JSON schema (an object)")
    if parameters:
        kind = parameters.get("type", "object")
        if kind != "object":
            raise _bad(
                "tools", f'{where}.function.parameters.type must be "object", got {_show(kind)}'
            )
        _check_schema(parameters, f"{where}.function.parameters", 0)
    return {"type": "function", **tool}


def _check_schema(schema: Any, where: str, depth: int) -> None:
    """The form of a schema, as far as any reader of it relies on it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise _bad("tools", f"{where} must be a JSON schema, got {_show(schema)}")
    if depth > 64:
        raise _bad("tools", f"{where} is nested deeper than 64 levels")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            known = ", ".join(_TYPES)
            raise _bad("tools", f"{where}.type must be one of {known}, got {_show(kind)}")
    for key in ("properties", "$defs", "definitions", "patternProperties"):
        parts = schema.get(key)
        if parts is not None and not isinstance(parts, Mapping):
            raise _bad("tools", f"{where}.{key} must be an object")
        for name, part in (parts or {}).items():
            _check_schema(part, f"{where}.{key}.{name}", depth + 1)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        parts = schema.get(key)
        if parts is not None and not (isinstance(parts, list) and parts):
            raise _bad("tools", f"{where}.{key} must be a list of schemas")
        for i, part in enumerate(parts or []):
            _check_schema(part, f"{where}.{key}[{i}]", depth + 1)
    for key in ("items", "additionalProperties"):
        part = schema.get(key)
        if part is not None and not isinstance(part, list):
            _check_schema(part, f"{where}.{key}", depth + 1)
    required = schema.get("required")
    if required is not None and not (
        isinstance(required, list) and all(isinstance(r, str) for r in required)
    ):
        raise _bad("tools", f"{where}.required must be a list of names")
    if "enum" in schema and not isinstance(schema["enum"], list):
        raise _bad("tools", f"{where}.enum must be a list")


def _mode(asked: Any, tools: tuple[Tool, ...]) -> tuple[Mode, tuple[Tool, ...]]:
    if asked == "none":
        return "none", ()
    if asked == "auto":
        return "auto", tools
    if asked == "required":
        return "required", tools
    if isinstance(asked, Mapping) and asked.get("type") == "function":
        return "named", (_named(asked, tools, "tool_choice"),)
    if isinstance(asked, Mapping) and asked.get("type") == "allowed_tools":
        return _allowed(asked.get("allowed_tools"), tools)
    raise _bad(
        "tool_choice",
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
        f'{{"name": ...}}}}, got {_show(asked)}',
    )


def _named(asked: Any, tools: tuple[Tool, ...], where: str) -> Tool:
    function = asked.get("function") if isinstance(asked, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _bad("tool_choice", f"{where}.function.name is missing")
    if not tools:
        raise _bad("tool_choice", "tool_choice needs tools")
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise _bad("tool_choice", f"{where} names the function {name!r}, which is not in tools")


def _allowed(asked: Any, tools: tuple[Tool, ...]) -> tuple[Mode, tuple[Tool, ...]]:
    where = "tool_choice.allowed_tools"
    if not isinstance(asked, Mapping) or asked.get("mode") not in ("auto", "required"):
        raise _bad("tool_choice", f'{where}.mode must be "auto" or "required"')
    listed = asked.get("tools")
    if not isinstance(listed, list) or not listed:
        raise _bad("tool_choice", f"{where}.tools must be a list of at least one tool")
    chosen = tuple(_named(t, tools, f"{where}.tools[{i}]") for i, t in enumerate(listed))
    return ("auto" if asked["mode"] == "auto" else "required"), chosen


def _bad(field: str, message: str) -> ApiError:
    return ApiError(400, message, param=field)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
