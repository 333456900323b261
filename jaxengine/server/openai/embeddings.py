"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from jaxengine.front.async_llm import AsyncLLM, Placement, off_loop
from jaxengine.server.errors import ApiError
from jaxengine.server.fields import EMBEDDING, check_extra
from jaxengine.server.openapi import answers
from jaxengine.server.state import visit_of
from jaxengine.server.streams import final_outputs, unless_hangup
from jaxengine.settings.pooling import pooling_settings
from jaxengine.text.outputs import EmbeddingOutput
from jaxengine.text.pooling import embedding_of, pooling_params
from jaxengine.text.processor import Prompt
from jaxengine.validation import MAX_PROMPTS, RequestError

router = APIRouter()

_AT_ONCE = 64  # prompts of one call that are in the engine together


class EmbeddingBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16"] | None = None
    endianness: Literal["native", "big", "little"] | None = None
    dimensions: int | None = None
    user: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # vLLM's name of the same
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None


@router.post("/v1/embeddings", response_model=None, responses=answers(400, 404, 413, 503))
async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    """One vector for each input: the model's last hidden states, pooled."""
    visit = visit_of(request, body)
    engine, model = visit.engine, visit.model
    check_extra(body.model_extra, EMBEDDING)
    check_form(body)
    prompts = prompts_of(body)
    if body.dimensions is not None and not body.dimensions >= 1:
        raise ApiError(400, "dimensions must be at least 1", param="dimensions")
    placement, name = visit.placement, visit.id
    work = embed_all(engine, body, prompts, name, placement)
    outputs = await unless_hangup(request, work)
    count = sum(len(output.prompt_token_ids) for output in outputs)

    def content() -> bytes:
        data = [
            {"object": "embedding", "index": i, "embedding": _vector(body, output)}
            for i, output in enumerate(outputs)
        ]
        return msgspec.json.encode(
            {
                "id": f"embd-{name}",
                "object": "list",
                "model": model,
                "data": data,
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }
        )

    numbers = sum(len(output.embedding) for output in outputs)
    answer = await off_loop(8 * numbers, content)  # as a text it has so many characters, or more
    return Response(answer, media_type="application/json")


def prompts_of(body: EmbeddingBody, most: int = MAX_PROMPTS) -> list[Prompt]:
    """A text, token ids, or a list of at most `most` of either. Raises ApiError naming `input`."""
    given = body.input
    if isinstance(given, str) or (given and all(type(item) is int for item in given)):
        inputs: list[Any] = [given]
    else:
        inputs = list(given)
    if not inputs:
        raise ApiError(400, "input must not be empty", param="input")
    if len(inputs) > most:
        raise ApiError(400, f"input has more than {most} entries", param="input")
    special = body.add_special_tokens is not False
    prompts: list[Prompt] = []
    for item in inputs:
        if isinstance(item, str):
            prompts.append({"prompt": item, "add_special_tokens": special})
        elif isinstance(item, list):
            prompts.append(item)
        else:
            raise ApiError(
                400, "input must be a text, token ids, or a list of either", param="input"
            )
    return prompts


async def embed_all(
    engine: AsyncLLM,
    body: EmbeddingBody,
    prompts: list[Prompt],
    name: str,
    placement: Placement,
) -> list[EmbeddingOutput]:
    """The vectors of all prompts, so many in the engine together. Raises RequestError naming
    `input`, and what `AsyncLLM.add` does."""
    room = asyncio.Semaphore(_AT_ONCE)
    pooling, normalize = pooling_settings(engine.config.model.pooler_config)

    async def one(i: int, prompt: Prompt) -> EmbeddingOutput:
        async with room:
            stream = await engine.add(
                prompt,
                pooling_params(body.truncate_prompt_tokens, body.truncation_side),
                f"{name}-{i}",
                kind="final",
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                placement=placement,
                pooling=body.pooling or pooling,
            )
            async with stream:
                (output,) = await final_outputs([stream])
        if output.outputs[0].embedding is None:
            raise ApiError(503, "the request was aborted", code="unavailable")
        asked = body.use_activation if body.normalize is None else body.normalize
        wanted = normalize if asked is None else asked
        return embedding_of(output, wanted, body.dimensions)

    tasks = [asyncio.ensure_future(one(i, prompt)) for i, prompt in enumerate(prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    except RequestError as error:
        field = "input" if error.field == "prompt" else error.field
        raise RequestError(field, error.message, error.code) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_form(body: EmbeddingBody) -> None:
    """Raises ApiError for fields that say two things, or say how bytes are to be where none are."""
    if None not in (body.normalize, body.use_activation) and body.normalize != body.use_activation:
        text = "normalize and use_activation are two names of one field, and differ"
        raise ApiError(400, text, param="use_activation")
    for name in ("embed_dtype", "endianness"):
        plain = getattr(body, name) in (None, "float32", "native")
        if not plain and body.encoding_format != "base64":
            text = f"{name} needs encoding_format base64"
            raise ApiError(400, text, param=name)


def _vector(body: EmbeddingBody, output: EmbeddingOutput) -> str | msgspec.Raw:
    """Encoded for itself: other threads run between two vectors."""
    if body.encoding_format == "base64":
        order = ">" if body.endianness == "big" else "<"
        kind = "f2" if body.embed_dtype == "float16" else "f4"
        return base64.b64encode(output.embedding.astype(order + kind).tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(output.embedding.tolist()))
