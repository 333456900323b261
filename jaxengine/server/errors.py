"""Errors as OpenAI's clients expect them, and what each exception means over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jaxengine.front.async_llm import (
    EngineDeadError,
    OverloadedError,
    ShuttingDownError,
    UnavailableError,
)
from jaxengine.text.chat_template import ChatTemplateError
from jaxengine.validation import RequestError

log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    503: "service_unavailable",
}
CLIENT_GONE = 499  # never sent: the client hung up; seen in the access log only
RETRY_AFTER = "1"  # seconds


class ApiError(Exception):
    """An error with its HTTP status. `param` names the field at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class ClientGone(Exception):
    """The client hung up before there was an answer."""


def error_body(error: ApiError) -> bytes:
    detail = {
        "message": error.message.encode(errors="replace").decode(),  # lone surrogates
        "type": _TYPES.get(error.status, "server_error"),
        "param": error.param,
        "code": error.code or error.status,
    }
    return msgspec.json.encode({"error": detail})


def error_response(error: ApiError) -> Response:
    headers = {"Retry-After": RETRY_AFTER} if error.status == 503 else None
    return Response(error_body(error), error.status, headers, "application/json")


def to_api_error(error: Exception) -> ApiError:
    """What an exception means for the client. Unknown ones are logged and say nothing inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, error.message, param=error.field, code=error.code)
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), param="messages")
    if isinstance(error, OverloadedError):
        return ApiError(503, str(error), code="overloaded")
    if isinstance(error, ShuttingDownError):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), code="unavailable")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, RequestValidationError):
        return _validation_error(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    log.error("internal error", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def _validation_error(problems: Sequence[Any]) -> ApiError:
    """One sentence about the first problem."""
    problem = problems[0]
    where = [str(part) for part in problem["loc"]]
    if where and where[0] in ("body", "query"):
        del where[0]
    field = where[0] if where else None
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {problem['ctx']['error']}")
    if field is None:
        return ApiError(400, f"the body must be a JSON object: {problem['msg'].lower()}")
    return ApiError(400, f"{field}: {problem['msg']}", param=field)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    return error_response(to_api_error(error))


def install(app: FastAPI) -> None:
    """Every error of the app, whatever raises it, is answered in the same form."""
    kinds: list[type[Exception]] = [
        ApiError,
        ClientGone,
        RequestError,
        ChatTemplateError,
        OverloadedError,
        ShuttingDownError,
        UnavailableError,
        EngineDeadError,
        RequestValidationError,
        HTTPException,
        Exception,
    ]
    for kind in kinds:
        app.add_exception_handler(kind, _answer)
