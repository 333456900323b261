"""What /openapi.json says beyond the types of the routes: every status that a route can answer
with, the form of errors, of completions and of streams, and the keys.

`answers` is for `responses=` of a route's decorator; `install` does what no decorator can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel

from jaxengine.server.openai.bodies import ChatCompletion, Completion

Responses = dict[int | str, dict[str, Any]]

_REF = "#/components/schemas/{name}"
_OBJECT = {"type": "object"}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_KEYS: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_ERRORS = {
    400: "The request is not valid; `param` names the field.",
    401: "A valid key is needed.",
    403: "The request comes from where the server takes none.",
    404: "There is no such model or object.",
    413: "The body is too large.",
    500: "The server failed at this request; its log has the details.",
    503: "Not now: loading, overloaded, without a healthy engine, or shutting down.",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | int


class ErrorBody(BaseModel):
    """An error as OpenAI's clients expect it."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """An error as Anthropic's clients expect it."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


def answers(*errors: int, body: type[BaseModel] = ErrorBody) -> Responses:
    """The errors of a route. 401, 403 and 500 are every route's."""
    return {
        status: {"model": body, "description": _ERRORS[status]}
        for status in sorted({401, 403, 500, *errors})
    }


def streamed(
    *errors: int, schema: Mapping[str, Any] = _OBJECT, body: type[BaseModel] = ErrorBody
) -> Responses:
    """As `answers`, of a route that gives `schema` whole, or server-sent events."""
    content = {
        "application/json": {"schema": dict(schema)},
        "text/event-stream": {"schema": _EVENT},
    }
    whole = {"description": "The whole answer, or events with `stream`.", "content": content}
    return {200: whole, **answers(*errors, body=body)}


def reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}


def install(app: FastAPI, needs_key: Callable[[str], bool]) -> None:
    """Finish the app's description when it is first asked for. `needs_key` tells of a path."""
    begun = app.openapi

    def finished() -> dict[str, Any]:
        if app.openapi_schema is None:
            _finish(begun(), needs_key)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = finished  # type: ignore[method-assign]


def _finish(made: dict[str, Any], needs_key: Callable[[str], bool]) -> None:
    schemas = made["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # what is not valid is 400 here
        schemas.pop(name, None)
    _, structs = msgspec.json.schema_components([Completion, ChatCompletion], ref_template=_REF)
    schemas |= structs
    for path, operations in made["paths"].items():
        keyed = needs_key(path)
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if keyed:
                operation["security"] = [{name: []} for name in _KEYS]
                made["components"]["securitySchemes"] = _KEYS
            else:
                operation["responses"].pop("401", None)
