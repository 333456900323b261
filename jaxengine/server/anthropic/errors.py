"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from jaxengine.server.errors import RETRY_AFTER, ApiError

PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path is one of that API's routes."""
    return path == PATH or path.startswith(f"{PATH}/")


def anthropic_error_body(error: ApiError, request_id: str) -> bytes:
    default = "invalid_request_error" if error.status < 500 else "api_error"
    detail = {
        "type": _TYPES.get(error.status, default),
        "message": error.message.encode(errors="replace").decode(),  # lone surrogates
    }
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})


def anthropic_error(error: ApiError, request_id: str) -> Response:
    headers = {"request-id": request_id}
    if error.status == 503:
        headers["Retry-After"] = RETRY_AFTER
    body = anthropic_error_body(error, request_id)
    return Response(body, error.status, headers, "application/json")
