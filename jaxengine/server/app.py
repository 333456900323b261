"""The FastAPI app. No JAX, no scheduler: everything behind it is `AsyncLLM`."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import jaxengine
from jaxengine.config import EngineConfig
from jaxengine.engine.async_llm import AsyncLLM
from jaxengine.server import admin, basic, chat, completions, errors, fault
from jaxengine.server.middleware import Gate
from jaxengine.server.state import ServerState


def build_app(engine: AsyncLLM | None, config: EngineConfig) -> FastAPI:
    """The app around `engine`. With None it answers 503 until `app.state.server.engine` is set."""
    app = FastAPI(
        title="jaxengine",
        version=jaxengine.__version__,
    )
    app.state.server = ServerState(config, engine)
    errors.install(app)
    for router in (completions.router, chat.router, basic.router, admin.router):
        app.include_router(router)
    if config.fault.enable_fault_tolerance:
        app.include_router(fault.router)
    app.add_middleware(Gate, config=config.server)
    if config.server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.server.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app
