"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from jaxengine.engine.async_llm import AsyncLLM, Placement, off_loop
from jaxengine.frontend.outputs import EmbeddingOutput
from jaxengine.frontend.pooling import embedding_of, pooling_params, pooling_settings
from jaxengine.frontend.processor import Prompt
from jaxengine.frontend.validation import RequestError
from jaxengine.server.errors import ApiError
from jaxengine.server.openapi import answers
from jaxengine.server.state import check_model, engine_of, placement_of, request_id_of
from jaxengine.server.streams import final_outputs, unless_hangup

router = APIRouter()

_AT_ONCE = 64  # prompts of one call that are in the engine together
_MOST_INPUTS = 2048  # as OpenAI


class EmbeddingBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    normalize: bool | None = None
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None


@router.post("/v1/embeddings", response_model=None, responses=answers(400, 404, 413, 503))
async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    """One vector for each input: the model's last hidden states, pooled."""
    engine = engine_of(request)
    model = check_model(request, body.model)
    prompts = prompts_of(body)
    if body.dimensions is not None and not body.dimensions >= 1:
        raise ApiError(400, "dimensions must be at least 1", param="dimensions")
    placement = placement_of(request, body.data_parallel_rank, body.user)
    name = request_id_of(request)
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


def prompts_of(body: EmbeddingBody) -> list[Prompt]:
    """A text, token ids, or a list of either. Raises ApiError naming `input`."""
    given = body.input
    if isinstance(given, str) or (given and all(type(item) is int for item in given)):
        inputs: list[Any] = [given]
    else:
        inputs = list(given)
    if not inputs:
        raise ApiError(400, "input must not be empty", param="input")
    if len(inputs) > _MOST_INPUTS:
        raise ApiError(400, f"input has more than {_MOST_INPUTS} entries", param="input")
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
                pooling_params(body.truncate_prompt_tokens),
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
        wanted = normalize if body.normalize is None else body.normalize
        return embedding_of(output, wanted, body.dimensions)

    tasks = [asyncio.ensure_future(one(i, prompt)) for i, prompt in enumerate(prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    except RequestError as error:
        field = "input" if error.field == "prompt" else error.field
        raise RequestError(field, error.message) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _vector(body: EmbeddingBody, output: EmbeddingOutput) -> str | msgspec.Raw:
    """Encoded for itself: other threads run between two vectors."""
    if body.encoding_format == "base64":
        return base64.b64encode(output.embedding.astype("<f4").tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(output.embedding.tolist()))
