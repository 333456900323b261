"""What the routes share: the engine (once it is up), the configuration, whether it drains."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request

from jaxengine.config import EngineConfig
from jaxengine.front.async_llm import AsyncLLM, Placement, served_name
from jaxengine.front.hub.messages import Figures
from jaxengine.server.errors import ApiError
from jaxengine.server.http_metrics import HttpMetrics
from jaxengine.validation import check_text

LONGEST = 16  # contexts that a text or a list of ids may fill where none is generated
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class ServerState:
    config: EngineConfig
    engine: AsyncLLM | None = None
    draining: bool = False
    http: HttpMetrics = field(default_factory=HttpMetrics)
    num_active: int = 0  # generation requests being answered
    started: int = field(default_factory=lambda: int(time.time()))
    # with several API processes: the figures of all, and what to do when requests are taken
    figures: Callable[[], Awaitable[Figures]] | None = None
    serving: Callable[[], Awaitable[None]] | None = None

    @property
    def model_names(self) -> list[str]:
        """The served name first, then the model argument, which is accepted too."""
        return list(dict.fromkeys([served_name(self.config), self.config.model.model]))


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def engine_of(request: Request) -> AsyncLLM:
    """The running engine. Raises ApiError 503 while the model loads or the server drains, and what
    `AsyncLLM.check` does."""
    state = state_of(request)
    if state.draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down")
    if state.engine is None:
        raise ApiError(503, "the model is still loading", code="loading")
    state.engine.check()
    return state.engine


def check_model(request: Request, model: str | None) -> str:
    """The name to answer with. Raises ApiError 404 for a model that is not served."""
    names = state_of(request).model_names
    if model and model not in names:
        raise ApiError(
            404,
            f"model {model!r} does not exist; {names[0]!r} is served",
            param="model",
            code="model_not_found",
        )
    return model or names[0]


def placement_of(
    request: Request, rank: int | None, user: str | None, session: str | None = None
) -> Placement:
    """Where a request wants to run: `rank`, `user` and `session` are its body's data_parallel_rank,
    user and session_id; the headers X-data-parallel-rank and X-Session-Id say the same. Raises
    ApiError 400, and RequestError for a name that is not valid Unicode."""
    header, name = request.headers.get("x-data-parallel-rank"), "data_parallel_rank"
    if header is not None:
        if not (header.isascii() and header.isdecimal() and len(header) < 10):
            raise ApiError(
                400, f"X-data-parallel-rank must be a rank's number, got {header!r}", param=name
            )
        if rank is not None and rank != int(header):
            raise ApiError(
                400,
                f"data_parallel_rank {rank} and X-data-parallel-rank {header} differ",
                param=name,
            )
        rank = int(header)
    if user is not None:
        check_text("user", user)
    if session is not None:
        check_text("session_id", session)
    return Placement(rank, request.headers.get("x-session-id") or session or user)


class GenerationBody(Protocol):
    """The fields of a body that say whom it wants to be answered by, not what it asks."""

    model: str | None
    request_id: str | None
    data_parallel_rank: int | None
    user: str | None
    session_id: str | None


@dataclass(frozen=True)
class Visit:
    """A request apart from what it asks: who answers it, under which names, and where."""

    engine: AsyncLLM
    model: str  # the name to answer with
    id: str
    placement: Placement
    size: int  # bytes of the body


def visit_of(request: Request, body: GenerationBody) -> Visit:
    """Raises as `engine_of`, `check_model`, `placement_of` and `request_id_of`."""
    return Visit(
        engine_of(request),
        check_model(request, body.model),
        request_id_of(request, body.request_id),
        placement_of(request, body.data_parallel_rank, body.user, body.session_id),
        body_size(request),
    )


def check_length(text: str, engine: AsyncLLM, field: str) -> None:
    """ApiError 400 for a text that is not worth counting: it has more characters than many times
    the context's tokens could hold."""
    most = LONGEST * engine.ready.max_model_len * engine.longest_token
    if len(text) > most:
        raise ApiError(
            400, f"{field} has {len(text)} characters, above the limit {most}", param=field
        )


def body_size(request: Request) -> int:
    """Bytes of the body, once it was read."""
    size: int = request.scope.get("body_bytes", 0)
    return size


def request_id_of(request: Request, named: str | None = None) -> str:
    """The client's X-Request-Id, or what the body `named`, or the one that the middleware made.
    Raises ApiError 400 for a name that could be no header."""
    if named is not None and not request.scope["request_id_given"]:
        if not REQUEST_ID.fullmatch(named):
            text = "request_id must be 1 to 128 visible ASCII characters"
            raise ApiError(400, text, param="request_id")
        request.scope["request_id"] = named
    request_id: str = request.scope["request_id"]
    return request_id
