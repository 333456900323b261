"""Routes for whoever runs the server. As everything but /health they need the API key."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from fastapi import APIRouter, Request

import jaxengine
from jaxengine.engine.async_llm import PAUSE_MODES, PauseMode
from jaxengine.server.errors import ApiError
from jaxengine.server.state import engine_of, state_of

router = APIRouter()

Answer = dict[str, Any]


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Answer:
    """Forget all cached prefixes; {"success": false} when some are in use."""
    return {"success": await engine_of(request).reset_prefix_cache()}


@router.post("/pause")
async def pause(request: Request, mode: str = "abort", clear_cache: bool = True) -> Answer:
    """Start nothing new until /resume. `mode`: abort what runs, wait for it, or keep it standing.
    New requests wait. Answers when it is done."""
    await engine_of(request).pause(_pause_mode(mode), clear_cache)
    return {"status": "paused"}


@router.post("/resume")
async def resume(request: Request) -> Answer:
    """Undo /pause."""
    await engine_of(request).resume()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(request: Request) -> Answer:
    return {"is_paused": await engine_of(request).is_paused()}


@router.post("/sleep")
async def sleep(request: Request, level: int = 1) -> Answer:
    """End what runs and give the device's memory back: level 1 keeps the weights in host memory,
    level 2 drops them too. Requests wait until /wake_up."""
    if level not in (1, 2):
        raise ApiError(400, f"level must be 1 or 2, got {level}", param="level")
    await engine_of(request).sleep(level)
    return {"status": "sleeping"}


@router.post("/wake_up")
async def wake_up(request: Request) -> Answer:
    """Undo /sleep. Answers when requests are served again."""
    await engine_of(request).wake_up()
    return {"status": "awake"}


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Answer:
    return {"is_sleeping": await engine_of(request).is_sleeping()}


@router.get("/server_info")
async def server_info(request: Request) -> Answer:
    """Version, settings (without the key), and what the engine says of itself."""
    config = dataclasses.asdict(state_of(request).config)
    if config["server"]["api_key"] is not None:
        config["server"]["api_key"] = "***"
    engine = engine_of(request)
    return {
        "version": jaxengine.__version__,
        "config": config,
        "engine": msgspec.structs.asdict(engine.ready),
        "stats": msgspec.structs.asdict(engine.stats),
    }


def _pause_mode(mode: str) -> PauseMode:
    for known in PAUSE_MODES:
        if mode == known:
            return known
    raise ApiError(400, f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", param="mode")
