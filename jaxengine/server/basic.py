"""The small routes: models, health, metrics, version, load, tokenize, detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.responses import Response

import jaxengine
from jaxengine.front.async_llm import UnavailableError, off_loop
from jaxengine.metrics.prometheus import CONTENT_TYPE, with_vllm_names
from jaxengine.server import page
from jaxengine.server.answer.render import render
from jaxengine.server.answer.tools import check_tools
from jaxengine.server.errors import RETRY_AFTER, ApiError
from jaxengine.server.openai.protocol import DetokenizeBody, TokenizeBody
from jaxengine.server.openapi import Responses, answers
from jaxengine.server.state import LONGEST, check_length, check_model, engine_of, state_of
from jaxengine.validation import check_text, check_token_ids

router = APIRouter()

_HEALTH: Responses = answers() | {503: {"description": "Requests cannot be served."}}


@router.get("/", response_model=None, include_in_schema=False)
async def chat_page() -> Response:
    """A page to talk to the model. It needs no key; what it asks the API for does."""
    return Response(page.html(), media_type="text/html", headers=page.headers())


@router.get("/health", response_model=None, responses=_HEALTH)
@router.get("/ping", response_model=None, responses=_HEALTH)
@router.post("/ping", response_model=None, responses=_HEALTH | answers(413))
async def health(request: Request) -> Response:
    """200 when requests can be served: {"status": "ok"}, or "degraded" while some ranks are not
    healthy. 503 while loading, draining, with a dead engine, or ("unavailable") without a healthy
    rank."""
    try:
        board = engine_of(request).board
    except UnavailableError:
        return JSONResponse({"status": "unavailable"}, 503, {"Retry-After": RETRY_AFTER})
    whole = len(board.healthy()) == len(board.ranks)
    return JSONResponse({"status": "ok" if whole else "degraded"})


@router.get("/health/live", responses=answers(503))
async def live(request: Request) -> dict[str, str]:
    """200 while this process answers and has not given up: starting it again would not help."""
    engine = state_of(request).engine
    if engine is not None and engine.dead_error is not None:
        raise engine.dead_error
    return {"status": "live"}


@router.get("/version", responses=answers())
async def version() -> dict[str, str]:
    return {"version": jaxengine.__version__}


@router.get("/load", responses=answers())
async def load(request: Request) -> dict[str, int]:
    """Requests that are being answered now."""
    state = state_of(request)
    if state.engine is None:
        return {"server_load": 0}
    if state.figures is not None and state.engine.is_running:
        return {"server_load": (await state.figures()).num_requests}
    return {"server_load": state.engine.num_requests}


@router.get(
    "/metrics",
    response_model=None,
    response_class=PlainTextResponse,
    responses=answers(),
)
async def metrics(request: Request) -> Response:
    """Prometheus text. Served with a dead engine too."""
    state = state_of(request)
    if state.engine is None:
        return Response(b"", media_type=CONTENT_TYPE)
    if state.figures is not None and state.engine.is_running:
        text = (await state.figures()).text
    else:
        text = state.engine.metrics.render() + state.http.render()
    if state.config.server.metrics_compat == "vllm":
        text = with_vllm_names(text)
    return Response(text, media_type=CONTENT_TYPE)


def _card(request: Request, name: str) -> dict[str, Any]:
    state = state_of(request)
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "jaxengine",
        "root": state.config.model.model,
        "parent": None,
        "max_model_len": engine_of(request).ready.max_model_len,
    }


@router.get("/v1/models", responses=answers(503))
async def models(request: Request) -> dict[str, Any]:
    names = state_of(request).model_names[:1]
    return {"object": "list", "data": [_card(request, name) for name in names]}


@router.get("/v1/models/{name:path}", responses=answers(404, 503))
async def model(name: str, request: Request) -> dict[str, Any]:
    return _card(request, check_model(request, name))


@router.post("/tokenize", response_model=None, responses=answers(400, 404, 413, 503))
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a text, or of a conversation rendered as for chat completions."""
    engine = engine_of(request)
    check_model(request, body.model)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the server has no tokenizer", param="prompt")
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt")
    if body.prompt is not None:
        text, special = check_text("prompt", body.prompt), body.add_special_tokens is not False
    else:
        tools = check_tools(body.tools)
        text, special = await render(body, engine, tools), bool(body.add_special_tokens)
    field = "messages" if body.prompt is None else "prompt"
    check_length(text, engine, field)
    longest = engine.ready.max_model_len

    def content() -> bytes:
        ids = tokenizer.encode(text, add_special_tokens=special)
        answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": longest}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.tk.id_to_token(i) for i in ids]
        return msgspec.json.encode(answer)

    return Response(await off_loop(len(text), content), media_type="application/json")


@router.get("/tokenizer_info", responses=answers(404, 503))
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What the tokenizer's configuration says, under the names of tokenizer_config.json. For
    servers with --enable-tokenizer-info-endpoint."""
    engine = engine_of(request)
    tokenizer = engine.tokenizer
    if not engine.config.server.enable_tokenizer_info_endpoint or tokenizer is None:
        raise ApiError(404, "/tokenizer_info needs --enable-tokenizer-info-endpoint")
    added = tokenizer.tk.get_added_tokens_decoder()
    return {
        "tokenizer_class": type(tokenizer.tk.model).__name__,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "eos_token_ids": list(tokenizer.eos_ids),
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": engine.ready.max_model_len,
        "chat_template": engine.chat_template,
        "added_tokens_decoder": {
            str(i): {"content": token.content, "special": token.special}
            for i, token in added.items()
        },
    }


@router.post("/detokenize", response_model=None, responses=answers(400, 404, 413, 503))
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    engine = engine_of(request)
    check_model(request, body.model)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the server has no tokenizer", param="tokens")
    most = LONGEST * engine.ready.max_model_len
    if len(body.tokens) > most:
        text = f"tokens has {len(body.tokens)} entries, above the limit {most}"
        raise ApiError(400, text, param="tokens")
    ids = check_token_ids("tokens", body.tokens, engine.ready.vocab_size)
    text = await off_loop(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False))
    return JSONResponse({"prompt": text})
