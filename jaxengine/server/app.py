"""The FastAPI app. No JAX, no scheduler: everything behind it is `AsyncLLM`."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import jaxengine
from jaxengine.config import EngineConfig
from jaxengine.front.async_llm import AsyncLLM
from jaxengine.server import admin, basic, docs_page, errors, fault, openapi
from jaxengine.server.anthropic import routes as anthropic_messages
from jaxengine.server.http_metrics import Observer
from jaxengine.server.keys import keys_of
from jaxengine.server.middleware import Gate, needs_key
from jaxengine.server.openai import chat, completions, embeddings, scores
from jaxengine.server.responses import routes as openai_responses
from jaxengine.server.state import ServerState


def build_app(engine: AsyncLLM | None, config: EngineConfig) -> FastAPI:
    """The app around `engine`. With None it answers 503 until `app.state.server.engine` is set.
    Raises ValueError for a key that cannot be read."""
    hidden = config.server.disable_fastapi_docs
    app = FastAPI(
        title="jaxengine",
        version=jaxengine.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None if hidden else "/openapi.json",
    )
    app.state.server = ServerState(config, engine)
    errors.install(app)
    for router in (
        completions.router,
        chat.router,
        embeddings.router,
        scores.router,
        basic.router,
        admin.router,
    ):
        app.include_router(router)
    openai_responses.install(app)
    app.include_router(anthropic_messages.router)
    if config.fault.enable_fault_tolerance:
        app.include_router(fault.router)
    if not hidden:
        docs_page.install(app)
    keys = keys_of(config.server)
    openapi.install(app, lambda path: needs_key(keys, path))
    app.add_middleware(Gate, config=config.server, keys=keys)
    if config.server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.server.allowed_origins,
            allow_methods=config.server.allowed_methods,
            allow_headers=config.server.allowed_headers,
            allow_credentials=config.server.allow_credentials,
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(Observer)
    return app
