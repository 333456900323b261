"""Routes for whoever runs the server. They need the admin key where there is one, else the API
key."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute

import jaxengine
from jaxengine.front.async_llm import PAUSE_MODES, PauseMode
from jaxengine.server.errors import ApiError
from jaxengine.server.openapi import answers
from jaxengine.server.state import engine_of, state_of

router = APIRouter()

Answer = dict[str, Any]
_PARTS = ("weights", "kv_cache")  # what can be woken alone


@router.post("/reset_prefix_cache", responses=answers(400, 413, 503))
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> Answer:
    """Forget all cached prefixes; {"success": false} when some are in use. With
    `reset_running_requests` none are: what runs starts over for it."""
    if reset_external:
        text = "reset_external is not supported: the tiers of KV offload keep their blocks"
        raise ApiError(400, text, param="reset_external", code="unsupported")
    return {"success": await engine_of(request).reset_prefix_cache(reset_running_requests)}


@router.post("/pause", responses=answers(400, 413, 503))
async def pause(request: Request, mode: str = "abort", clear_cache: bool = True) -> Answer:
    """Start nothing new until /resume. `mode`: abort what runs, wait for it, or keep it standing.
    New requests wait. Answers when it is done."""
    await engine_of(request).pause(_pause_mode(mode), clear_cache)
    return {"status": "paused"}


@router.post("/resume", responses=answers(413, 503))
async def resume(request: Request) -> Answer:
    """Undo /pause."""
    await engine_of(request).resume()
    return {"status": "resumed"}


@router.get("/is_paused", responses=answers(503))
async def is_paused(request: Request) -> Answer:
    return {"is_paused": await engine_of(request).is_paused()}


@router.post("/sleep", responses=answers(400, 413, 503))
async def sleep(request: Request, level: int = 1, mode: str = "abort") -> Answer:
    """Give the device's memory back: level 1 keeps the weights in host memory, level 2 drops them
    too. `mode`: abort what runs, wait for it, or keep it to go on with. Requests wait until
    /wake_up."""
    if level not in (1, 2):
        raise ApiError(400, f"level must be 1 or 2, got {level}", param="level")
    await engine_of(request).sleep(level, _pause_mode(mode))
    return {"status": "sleeping"}


@router.post("/wake_up", responses=answers(400, 413, 503))
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Answer:
    """Undo /sleep, or of it what `tags` name: weights, kv_cache. Answers when it is done; requests
    are served again when both are there ({"status": "awake"})."""
    for tag in tags or ():
        if tag not in _PARTS:
            text = f"tags must be among {', '.join(_PARTS)}, got {tag!r:.60}"
            raise ApiError(400, text, param="tags")
    awake = await engine_of(request).wake_up(tags)
    answer: Answer = {"status": "awake" if awake else "sleeping"}
    return answer if tags is None else {**answer, "tags": tags}


@router.get("/is_sleeping", responses=answers(503))
async def is_sleeping(request: Request) -> Answer:
    return {"is_sleeping": await engine_of(request).is_sleeping()}


@router.get("/server_info", responses=answers(503))
async def server_info(request: Request) -> Answer:
    """Version, settings (without what is secret), and what the engine says of itself."""
    config = without_secrets(dataclasses.asdict(state_of(request).config))
    engine = engine_of(request)
    return {
        "version": jaxengine.__version__,
        "config": config,
        "engine": msgspec.structs.asdict(engine.ready),
        "stats": msgspec.structs.asdict(engine.stats),
    }


# A text whose name has one of these words is shown to nobody, nor are options of others, which have
# names of their own.
_SECRET = frozenset(
    ("authorization", "credential", "credentials", "key", "keys", "password", "secret", "token")
)
_OPTIONS = ("object_store_options",)
_MASK = "***"
_CREDENTIALS = re.compile(r"(\w+://)[^/@\s]+@")


def without_secrets(value: Any, name: str = "") -> Any:
    """Settings with keys, passwords and the credentials in URLs masked. JSON settings that were
    given as text are shown as objects, so that nothing hides in them."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, dict):
        if name in _OPTIONS:
            return dict.fromkeys(value, _MASK)
        return {k: without_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if _SECRET & set(re.split(r"[^a-z]+", name.lower())) and not name.endswith("_file"):
        return _MASK
    return _CREDENTIALS.sub(rf"\1{_MASK}@", value)


@router.post("/start_profile", responses=answers(400, 413, 503))
async def start_profile(request: Request) -> Answer:
    """Begin a trace of every engine's steps, in folders below --profiler-dir."""
    return {"status": "profiling", "folders": await _profiler(request, "start_profile")}


@router.post("/stop_profile", responses=answers(400, 413, 503))
async def stop_profile(request: Request) -> Answer:
    """End the trace; `files` (on the server) open in Perfetto."""
    return {"status": "stopped", "files": await _profiler(request, "stop_profile")}


async def _profiler(request: Request, method: str) -> list[str]:
    if state_of(request).config.server.profiler_dir is None:
        raise ApiError(400, "profiling needs the server's --profiler-dir", code="no_profiler")
    try:
        answer = await engine_of(request).call(method)
    except RuntimeError as error:
        name, _, text = str(error).partition(": ")
        if name != "ValueError":
            raise
        raise ApiError(400, text) from None
    found: list[str] = []  # one engine's answer, or a list of the engines' answers
    for part in answer if isinstance(answer, list) else [answer]:
        found += part if isinstance(part, list) else [part]
    return found


_PATHS = frozenset(route.path for route in router.routes if isinstance(route, APIRoute))
_BELOW = "/fault_tolerance/"


def is_admin(path: str) -> bool:
    """Whether a route is for whoever runs the server alone."""
    return path.rstrip("/") in _PATHS or path.startswith(_BELOW)


def _pause_mode(mode: str) -> PauseMode:
    for known in PAUSE_MODES:
        if mode == known:
            return known
    raise ApiError(400, f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", param="mode")
