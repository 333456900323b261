"""POST /score, /rerank and /pooling: what can be made of embeddings. A score is the cosine of two
texts' vectors; any model answers, and how much that means is its own affair."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from jaxengine.front.async_llm import off_loop
from jaxengine.server.errors import ApiError
from jaxengine.server.fields import EMBEDDING, SCORE, check_extra
from jaxengine.server.openai.embeddings import EmbeddingBody, embed_all, prompts_of
from jaxengine.server.openapi import answers
from jaxengine.server.state import check_model, request_id_of, visit_of
from jaxengine.server.streams import unless_hangup
from jaxengine.text.outputs import EmbeddingOutput
from jaxengine.validation import MAX_PROMPTS, RequestError

router = APIRouter()

_ERRORS = answers(400, 404, 413, 503)
_SCORE = {**SCORE, "use_activation": (None, True)}  # a score is of vectors of length 1
_POOLING = {**EMBEDDING, "embed_dtype": (None, "float32"), "endianness": (None, "native")}


class _Common(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    user: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None


class ScoreBody(_Common):
    """`text_1` and `text_2` are also called queries and documents."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class RerankBody(_Common):
    query: str
    documents: list[str]
    top_n: int | None = None


class PoolingBody(_Common):
    input: str | list[Any]
    task: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # vLLM's name of the same
    dimensions: int | None = None
    encoding_format: Literal["float"] | None = None


@router.post("/score", response_model=None, responses=_ERRORS)
@router.post("/v1/score", response_model=None, responses=_ERRORS)
async def score(body: ScoreBody, request: Request) -> Response:
    """How alike texts are: one against each of many, or many pairs."""
    model = check_model(request, body.model)
    check_extra(body.model_extra, _SCORE)
    first, one = _texts(body, "text_1", "queries")
    second, two = _texts(body, "text_2", "documents")
    _check_count(first, one)
    _check_count(second, two)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise ApiError(
            400, f"{one} and {two} must have as many texts, or {one} just one", param=one
        )
    vectors, count = await _vectors(body, request, [*first, *second], (one, two), len(first))
    scores = np.einsum("ij,ij->i", vectors[: len(first)], vectors[len(first) :])
    data = [{"index": i, "object": "score", "score": float(s)} for i, s in enumerate(scores)]
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    return _answer(
        {
            "id": f"score-{request_id_of(request)}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": usage,
        }
    )


@router.post("/rerank", response_model=None, responses=_ERRORS)
@router.post("/v1/rerank", response_model=None, responses=_ERRORS)
@router.post("/v2/rerank", response_model=None, responses=_ERRORS)
async def rerank(body: RerankBody, request: Request) -> Response:
    """The documents, those most like the query first."""
    model = check_model(request, body.model)
    check_extra(body.model_extra, _SCORE)
    if not body.documents:
        raise ApiError(400, "documents must not be empty", param="documents")
    _check_count(body.documents, "documents")
    if body.top_n is not None and body.top_n < 0:
        raise ApiError(400, "top_n must be at least 0 (0: all)", param="top_n")
    texts = [body.query, *body.documents]
    vectors, count = await _vectors(body, request, texts, ("query", "documents"), 1)
    scores = vectors[1:] @ vectors[0]
    order = np.argsort(-scores, kind="stable")[: body.top_n or None]
    results = [
        {
            "index": i,
            "document": {"text": body.documents[i]},
            "relevance_score": float(scores[i]),
        }
        for i in order.tolist()
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    name = f"rerank-{request_id_of(request)}"
    return _answer({"id": name, "model": model, "usage": usage, "results": results})


@router.post("/pooling", response_model=None, responses=_ERRORS)
async def pooling(body: PoolingBody, request: Request) -> Response:
    """The pooled hidden states as they are, or with length 1 (`normalize`)."""
    model = check_model(request, body.model)
    check_extra(body.model_extra, _POOLING)
    if body.task not in (None, "embed"):
        text = f"task must be embed, got {body.task!r:.60}: there is one vector for each input"
        raise ApiError(400, text, param="task", code="unsupported")
    if body.dimensions is not None and body.dimensions < 1:
        raise ApiError(400, "dimensions must be at least 1", param="dimensions")
    wanted = body.use_activation if body.normalize is None else body.normalize
    asked = _embedding_body(body, body.input, bool(wanted), body.dimensions)
    outputs = await _embed(asked, request)

    def content() -> Response:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        data = [
            {"index": i, "object": "pooling", "data": output.embedding.tolist()}
            for i, output in enumerate(outputs)
        ]
        return _answer(
            {
                "id": f"pool-{request_id_of(request)}",
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": data,
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }
        )

    return await off_loop(8 * sum(len(output.embedding) for output in outputs), content)


def _check_count(texts: Sequence[str], field: str) -> None:
    if len(texts) > MAX_PROMPTS:
        text = f"{field} has {len(texts)} entries, above the limit {MAX_PROMPTS}"
        raise ApiError(400, text, param=field)


def _answer(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _texts(body: ScoreBody, name: str, other: str) -> tuple[list[str], str]:
    """The texts, and what the client calls them. Raises ApiError 400."""
    given = {n: value for n in (name, other) if (value := getattr(body, n)) is not None}
    if len(given) != 1:
        raise ApiError(400, f"exactly one of {name} and {other} is needed", param=name)
    [(field, value)] = given.items()
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise ApiError(400, f"{field} must not be empty", param=field)
    return texts, field


def _embedding_body(
    body: _Common, texts: Any, normalize: bool, dimensions: int | None = None
) -> EmbeddingBody:
    return EmbeddingBody(
        input=texts,
        user=body.user,
        session_id=body.session_id,
        request_id=body.request_id,
        normalize=normalize,
        dimensions=dimensions,
        pooling=body.pooling,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        priority=body.priority,
        cache_salt=body.cache_salt,
        data_parallel_rank=body.data_parallel_rank,
    )


async def _embed(body: EmbeddingBody, request: Request) -> list[EmbeddingOutput]:
    visit = visit_of(request, body)
    prompts = prompts_of(body, 2 * MAX_PROMPTS)  # of two lists
    work = embed_all(visit.engine, body, prompts, visit.id, visit.placement)
    return await unless_hangup(request, work)


async def _vectors(
    body: _Common, request: Request, texts: list[str], fields: tuple[str, str], first: int
) -> tuple[Any, int]:
    """[texts, D] of length 1, each different text worked out once, and the tokens of all. The
    first `first` texts came by the first field."""
    distinct = list(dict.fromkeys(texts))
    try:
        outputs = await _embed(_embedding_body(body, distinct, True), request)
    except (ApiError, RequestError) as error:
        named = error.param if isinstance(error, ApiError) else error.field
        if named != "input":
            raise
        field = fields[1] if all(texts[:first]) else fields[0]
        if error.code is not None:
            raise ApiError(400, error.message, param=field, code=error.code) from None
        message = error.message.replace("input", field)
        raise ApiError(400, message.replace("prompt", field, 1), param=field) from None
    at = {text: i for i, text in enumerate(distinct)}
    vectors = np.stack([outputs[at[text]].embedding for text in texts])
    return vectors, sum(len(outputs[at[text]].prompt_token_ids) for text in texts)
